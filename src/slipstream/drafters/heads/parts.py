"""What a head takes from its target: rows of the embedding and of the LM head, the final norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.core.errors import UnsupportedError
from slipstream.kernels.pack import pack
from slipstream.kernels.packed import BLOCKS, Packed
from slipstream.models.heads.head import store
from slipstream.models.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slipstream.models.files import ModelFile


@dataclass(frozen=True, slots=True, eq=False)
class TargetParts:
    """embedding, head: [vocab, hidden] as they lie on disk, one tensor when they are tied.

    norm, eps: the final RMS norm; None where the model ends in another norm. padding: ids that are no tokens and are
    never drafted.
    """

    embedding: Tensor
    head: Tensor
    norm: NDArray[np.float32] | None
    eps: float
    padding: frozenset[int] = frozenset()

    def final_norm(self) -> NDArray[np.float32]:
        """The final norm's weight. Raises UnsupportedError where heads cannot be given what they were trained on."""
        if self.norm is None:
            raise UnsupportedError("heads that read the output of the final norm need a model that ends in an RMS norm")
        return self.norm

    def head_rows(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Rows of the LM head as fp32 [ids, hidden]."""
        return Tensor(self.head.type, (len(ids), self.head.shape[1]), self.head.raw[ids]).float32()

    def packed_head(self, ids: NDArray[np.int32], compact: bool = False) -> Packed:
        """Rows of the LM head, packed in the type they have; quantised blocks stay as they are.

        compact: floats become Q8_0, which is read in a fraction of the time; a draft need not be exact.
        """
        if compact and self.head.type in ("F32", "F16", "BF16") and self.head.shape[1] % BLOCKS["Q8_0"][0] == 0:
            return packed(store(self.head_rows(ids), "Q8_0"))
        return pack(self.head.type, self.head.raw, self.head.shape[1], ids)

    def packed_embedding(self) -> Packed:
        """The whole embedding."""
        return packed(self.embedding)


def packed(tensor: Tensor) -> Packed:
    """A matrix in the type it is stored in."""
    return pack(tensor.type, tensor.raw, tensor.shape[1])


def parts_of(model: ModelFile) -> TargetParts:
    """The parts of an opened model. Raises ModelError where a tensor is missing."""
    embedding = model.tensor("model.embed_tokens.weight")
    head = embedding if model.config.tie_embeddings else model.tensor("lm_head.weight")
    norm = model.tensor("model.norm.weight").float32().reshape(-1)
    return TargetParts(embedding, head, norm, model.config.rms_eps, frozenset(model.config.padding_ids))


def parts_of_torch(model: Any) -> TargetParts:
    """The parts of a loaded model of transformers, copied to the host in fp32."""

    def values(tensor: Any) -> Tensor:
        return store(tensor.detach().float().cpu().numpy(), "F32")

    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    held = values(embedding)
    same = head is embedding or head.data_ptr() == embedding.data_ptr()
    found: Any = getattr(model.base_model, "norm", None)
    # Gemma's norms multiply by 1 + weight.
    plain = type(found).__name__.endswith("RMSNorm") and "Gemma" not in type(found).__name__
    weight = found.weight.detach().float().cpu().numpy() if plain else None
    return TargetParts(held, held if same else values(head), weight, float(getattr(found, "variance_epsilon", 1e-6)))
