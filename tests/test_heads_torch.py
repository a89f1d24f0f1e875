"""One architecture, two computations: the native head gives what the torch module gives."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import head_beds  # noqa: E402
import native_beds  # noqa: E402
from slipstream.drafters.heads.medusa import Medusa  # noqa: E402
from slipstream.drafters.heads.modules import load_arrays, make_module  # noqa: E402
from slipstream.drafters.heads.parts import parts_of  # noqa: E402
from test_heads_kernels import EAGLES, Bed  # noqa: E402

LENGTH = 30


def module_of(head):
    parts = parts_of(native_beds.model())
    embedding = torch.from_numpy(parts.embedding.float32())
    rows = torch.from_numpy(parts.head_rows(head.ids)) if head.config.frozen_head else None
    module = make_module(head.config, None if head.config.own_embedding else embedding, rows)
    load_arrays(module, head.arrays())
    return module.eval()


def features_for_torch(bed, features):
    """EAGLE-1 modules are given features after the target's final norm; the native head norms them itself."""
    if bed.weights.three:
        return torch.from_numpy(features)[None]
    mean = (features * features).mean(1, keepdims=True)
    return torch.from_numpy(features / np.sqrt(mean + bed.weights.feature_eps) * bed.weights.feature_norm)[None]


@pytest.mark.parametrize("name", EAGLES)
def test_native_equals_the_torch_module(name):
    bed, module = Bed(name), module_of(head_beds.head(name))
    tokens, features = native_beds.tokens(LENGTH), bed.features(LENGTH)
    first = bed.run(tokens, range(-1, LENGTH - 1), features, fresh=True, store=True)
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        valid = torch.ones(1, LENGTH, dtype=torch.bool)
        h, context = module.read(features_for_torch(bed, features), ids, valid, 0)
        assert np.allclose(module.logits(h, ids)[0].numpy(), first.logits, atol=2e-3, rtol=1e-3)
        drafted = torch.randint(0, 50, (1, LENGTH), generator=torch.Generator().manual_seed(1))
        later = module.step(h, drafted, context, 1, 0)
        wanted = module.logits(later, drafted)[0, -1].numpy()
    token = int(drafted[0, -1])
    below = bed.run([token], [-1], first.hidden[-1:], prefix=[LENGTH], fresh=False, store=False)
    assert np.allclose(below.logits[0], wanted, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["medusa", "medusa-shared"])
def test_native_medusa_equals_the_torch_module(name):
    head = head_beds.head(name)
    drafter, module = Medusa(head, parts_of(native_beds.model()), 101), module_of(head)
    states = np.random.default_rng(0).standard_normal((3, 48), np.float32)
    for number in range(head.config.medusa_heads):
        with torch.inference_mode():
            wanted = module.logits(torch.from_numpy(states), number).numpy()
        assert np.allclose(drafter.logits(number, states), wanted, atol=1e-3, rtol=1e-3)


def test_planted_other_norm_flag_is_seen():
    bed, module = Bed("eagle3"), module_of(head_beds.head("eagle3", norm_before_residual=True))
    tokens, features = native_beds.tokens(5), bed.features(5)
    made = bed.run(tokens, range(-1, 4), features, fresh=True, store=True)
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        h, _ = module.read(features_for_torch(bed, features), ids, torch.ones(1, 5, dtype=torch.bool), 0)
        assert not np.allclose(module.logits(h, ids)[0].numpy(), made.logits, atol=0.1)
