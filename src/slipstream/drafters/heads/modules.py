"""The heads as torch modules: one definition for training and for drafting where the target runs in torch.

Parameters carry the canonical names of `models.heads.config.tensors`. Shapes: B rows, T positions, D target_hidden,
H hidden. Position s holds the features of token s and the embedding of token s + 1; the head there guesses token s + 2.
A draft goes on from its own output instead of features: `step` j of position s guesses token s + 2 + j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.drafters.heads.weights import rope_of
from slipstream.models.heads.config import HeadConfig, tensors

Pair = tuple[Tensor, Tensor]
"""Keys and values, each [B, kv_heads, T, head_dim]."""


class Norm(nn.Module):
    """RMS norm over the last axis, or over each of `parts` equal parts of it on its own."""

    def __init__(self, width: int, eps: float, parts: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.parts = eps, parts

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width], computed in fp32."""
        split = x.float().unflatten(-1, (self.parts, -1))
        scale = torch.rsqrt(split.square().mean(-1, keepdim=True) + self.eps)
        return (split * scale).flatten(-2) * self.weight


class Attention(nn.Module):
    """Projections of one layer; what is attended to is the caller's affair."""

    def __init__(self, config: HeadConfig, inputs: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width, bias = config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(inputs, config.heads * width, bias=bias)
        self.k_proj = nn.Linear(inputs, config.kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(inputs, config.kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.heads * width, config.hidden, bias=False)

    def queries(self, x: Tensor, rope: Pair) -> Tensor:
        """[B, heads, T, head_dim]"""
        return rotate(self._split(self.q_proj(x), self.heads), rope)

    def pair(self, x: Tensor, rope: Pair) -> Pair:
        """Keys and values of x [B, T, inputs]."""
        return rotate(self._split(self.k_proj(x), self.kv_heads), rope), self._split(self.v_proj(x), self.kv_heads)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    """One decoder layer. The first of an EAGLE-3 head reads cat(norm(embedding), hidden_norm(h))."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        three, first = config.kind == "eagle3", index == 0
        self.both = three and first
        self.normed_residual = config.norm_before_residual
        if three or not first:
            self.input_layernorm = Norm(config.hidden, config.eps)
        if self.both:
            self.hidden_norm = Norm(config.hidden, config.eps)
        self.plain = not three and first
        self.self_attn = Attention(config, 2 * config.hidden if self.both else config.hidden)
        self.post_attention_layernorm = Norm(config.hidden, config.eps)
        self.mlp = Mlp(config)

    def inputs(self, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What attention reads, the residual, and norm(embedding) where this layer makes it (else e)."""
        if self.both:
            e, hn = self.input_layernorm(e), self.hidden_norm(h)
            return torch.cat([e, hn], -1), hn if self.normed_residual else h, e
        return (h if self.plain else self.input_layernorm(h)), h, e

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its residual and what attention gathered [B, heads, T, head_dim]."""
        residual = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Mlp(nn.Module):
    """The gated block."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden, config.intermediate, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden]"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(slots=True)
class Context:
    """What a draft attends to, per layer: pairs of the real positions, then one pair per drafted step.

    seen: bool [B, 1, Q, K], which real positions each of the Q drafting positions may read.
    """

    real: list[Pair]
    seen: Tensor
    steps: list[list[Pair]] = field(default_factory=list)


class EagleHead(nn.Module):
    """EAGLE-1 and EAGLE-3 heads. embedding [vocab, H] and head_rows [draft_vocab, H] are the target's, not trained.

    head_rows is needed where config.frozen_head; embedding where there is no own one. Raises UnsupportedError for a
    scaling of rotary positions that is not known.
    """

    def __init__(self, config: HeadConfig, embedding: Tensor | None, head_rows: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self._rope = rope_of(config)
        parts = len(config.feature_layers) or 3
        if config.feature_norm:
            self.feature_norm = Norm(config.target_hidden * parts, config.eps, parts)
        self.fc = nn.Linear(config.inputs, config.hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.layers))
        if config.embedding_residual:
            self.embedding_residual = nn.Linear(config.hidden, config.hidden, bias=False)
        if config.kind == "eagle3":
            self.norm = Norm(config.hidden, config.eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        if not config.frozen_head:
            self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)
        if config.markov_rank:
            self.markov_in = nn.Embedding(config.vocab, config.markov_rank)
            self.markov_out = nn.Linear(config.markov_rank, config.draft_vocab, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head_rows", head_rows, persistent=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H]"""
        table = self.embed_tokens.weight if self.config.own_embedding else self.embedding
        return F.embedding(tokens, table).float()

    def rope(self, first: int, count: int) -> Pair:
        """cos and sin [count, head_dim / 2] of positions first .. first + count - 1, those that drafting uses."""
        self._rope.ensure(first + count)
        tables = (self._rope.cos, self._rope.sin)
        cos, sin = (torch.from_numpy(table[first : first + count]).to(self.fc.weight.device) for table in tables)
        return cos, sin

    def reduce(self, features: Tensor) -> Tensor:
        """The target's features [..., inputs] as the hidden state that drafting goes on with (EAGLE-3)."""
        features = features.float()
        return self.fc(self.feature_norm(features) if self.config.feature_norm else features)

    def _enter(self, h: Tensor, e: Tensor) -> Tensor:
        return self.fc(torch.cat([e, h.float()], -1)) if self.config.kind == "eagle1" else h

    def _first(self, h: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        x, residual, normed = self.layers[0].inputs(h, e)
        if self.config.embedding_residual:
            residual = residual + self.embedding_residual(normed)
        return x, residual

    def read(self, features: Tensor, tokens: Tensor, valid: Tensor, start: int) -> tuple[Tensor, Context]:
        """The first step at positions start .. T - 1, and what later steps attend to.

        features [B, T, target's], tokens [B, T] (token s + 1 at position s), valid bool [B, T]. Returns [B, Q, H].
        """
        e = self.embed(tokens)
        h = self._enter(self.reduce(features) if self.config.kind == "eagle3" else features, e)
        size = tokens.shape[1]
        rope = self.rope(0, size)
        causal = torch.ones(size, size, dtype=torch.bool, device=h.device).tril()
        seen = (causal & valid[:, None, :]) | torch.eye(size, dtype=torch.bool, device=h.device)
        context = Context([], seen[:, None, start:])
        x, residual = self._first(h, e)
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            if index:
                x, residual, _ = layer.inputs(h, e)
            pair = layer.self_attn.pair(x, rope)
            context.real.append(pair)
            begin = start if last else 0
            queries = layer.self_attn.queries(x[:, begin:], (rope[0][begin:], rope[1][begin:]))
            attended = attend(queries, pair, seen[:, None, begin:], [])
            h = layer.finish(residual[:, begin:], attended)
        context.steps = [[] for _ in self.layers]
        return h, context

    def step(self, h: Tensor, tokens: Tensor, context: Context, number: int, start: int) -> Tensor:
        """Step `number` (1, 2, ...) of every position: h [B, Q, H] of the step before, tokens [B, Q] after it."""
        e = self.embed(tokens)
        h = self._enter(h, e)
        rope = self.rope(start + number, tokens.shape[1])
        x, residual = self._first(h, e)
        for index, layer in enumerate(self.layers):
            if index:
                x, residual, _ = layer.inputs(h, e)
            context.steps[index].append(layer.self_attn.pair(x, rope))
            queries = layer.self_attn.queries(x, rope)
            h = layer.finish(residual, attend(queries, context.real[index], context.seen, context.steps[index]))
        return h

    def normed(self, h: Tensor) -> Tensor:
        """What the LM head reads of a hidden state."""
        return self.norm(h) if self.config.kind == "eagle3" else h

    def logits(self, h: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits over the draft vocabulary [..., draft_vocab]; tokens: those just before, for the Markov bias."""
        h = self.normed(h)
        found: Tensor = F.linear(h, self.head_rows) if self.config.frozen_head else self.lm_head(h)
        if self.config.markov_rank and tokens is not None:
            found = found + self.markov_out(self.markov_in(tokens))
        return found


class MedusaHead(nn.Module):
    """Medusa: head k guesses token s + 2 + k from the target's last hidden state (after its final norm) at s."""

    def __init__(self, config: HeadConfig, head_rows: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.medusa = nn.ModuleList(MedusaBlocks(config) for _ in range(config.medusa_heads))
        self.register_buffer("head_rows", head_rows, persistent=False)

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """[..., draft_vocab] of one head, from hidden [..., H]."""
        block = self.medusa[head]
        h = block(hidden.float())
        return F.linear(h, self.head_rows) if self.config.frozen_head else block.lm_head(h)


class MedusaBlocks(nn.Module):
    """The residual blocks of one Medusa head, named 0, 1, ... and its LM head."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.count = config.medusa_layers
        for index in range(config.medusa_layers):
            self.add_module(str(index), MedusaBlock(config.hidden))
        if not config.frozen_head:
            self.lm_head = nn.Linear(config.hidden, config.draft_vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H]"""
        for index in range(self.count):
            x = self.get_submodule(str(index))(x)
        return x


class MedusaBlock(nn.Module):
    """x + SiLU(W x + b); W and b begin at 0, so that a new head begins as the target's own guess."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H]"""
        return x + F.silu(self.linear(x))


def rotate(x: Tensor, rope: Pair) -> Tensor:
    """Rotary positions, halves of a head paired as in the Llama family. x [B, heads, T, head_dim]."""
    cos, sin = rope
    one, two = x.float().chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)


def attend(queries: Tensor, real: Pair, seen: Tensor, steps: Sequence[Pair]) -> Tensor:
    """Softmax attention over real positions where `seen`, and over the same position in each drafted step.

    queries [B, heads, Q, d]; real [B, kv_heads, K, d]; seen bool [B, 1, Q, K]; steps [B, kv_heads, Q, d] each.
    """
    groups = queries.shape[1] // real[0].shape[1]
    keys, values = (part.repeat_interleave(groups, 1) for part in real)
    scale = queries.shape[-1] ** -0.5
    scores = (queries @ keys.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    size = scores.shape[-1]
    own = [
        (queries.float() * key.repeat_interleave(groups, 1).float()).sum(-1, keepdim=True) * scale for key, _ in steps
    ]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    found = weights[..., :size].to(values.dtype) @ values
    for number, (_, value) in enumerate(steps):
        found = found + weights[..., size + number : size + number + 1] * value.repeat_interleave(groups, 1)
    return found.to(queries.dtype)


def make_module(config: HeadConfig, embedding: Tensor | None, head_rows: Tensor | None) -> EagleHead | MedusaHead:
    """A module for a description; its parameters are those that the description names, in any order."""
    medusa = config.kind == "medusa"
    module = MedusaHead(config, head_rows) if medusa else EagleHead(config, embedding, head_rows)
    named = {name: tuple(value.shape) for name, value in module.named_parameters()}
    assert named == tensors(config), "modules and description differ"
    return module


def load_arrays(module: nn.Module, arrays: Mapping[str, NDArray[np.float32]]) -> None:
    """Set all parameters from arrays by canonical name."""
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}, strict=True)


def arrays_of(module: nn.Module) -> dict[str, NDArray[Any]]:
    """All parameters as fp32 arrays by canonical name."""
    return {name: value.detach().float().cpu().numpy() for name, value in module.named_parameters()}
