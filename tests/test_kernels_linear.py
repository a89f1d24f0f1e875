"""`linear`: every type, instruction set, number of rows and of threads gives the bits of the numpy twin."""

import gguf
import numpy as np
import pytest

from kernel_weights import bits, raw_weights
from slipstream import kernels
from slipstream.core.errors import InputError
from slipstream.kernels import native, reference
from slipstream.kernels.packed import BLOCKS, TYPES

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 33)
compiled = pytest.mark.skipif(native.core is None, reason="built without a compiler")
SETS = native.core.available_kernels() if native.core is not None else []


def run(isa, x, packed, bias=None):
    out = np.full((len(x), packed.shape[0]), np.nan, np.float32)
    native.core.linear(np.ascontiguousarray(x), packed.handle, out, bias, isa)
    return out


@pytest.fixture(scope="module")
def cases():
    """For each type: weights [75, 512] (75 is no multiple of a panel), inputs [512, 512], the twin's first 33 rows."""
    rng = np.random.default_rng(11)
    found = {}
    for name in TYPES:
        raw = raw_weights(rng, name, 75, 512)
        x = rng.standard_normal((512, 512)).astype(np.float32)
        found[name] = raw, x, reference.multiply(x[:33], reference.dequantise(name, raw).T.copy())
    return found


@pytest.mark.parametrize("name", TYPES)
def test_unpacking_equals_gguf(name, cases):
    raw, _, _ = cases[name]
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert (bits(reference.dequantise(name, raw)) == bits(expected)).all()
    ids = np.array([74, 0, 31, 32, 33, 0])
    assert (bits(kernels.unpack_rows(kernels.pack(name, raw, 512), ids)) == bits(expected[ids])).all()


@compiled
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", TYPES)
def test_equals_the_numpy_twin_for_any_number_of_rows(name, isa, cases):
    raw, x, expected = cases[name]
    packed = kernels.pack(name, raw, 512)
    for rows in ROWS:
        assert (bits(run(isa, x[:rows], packed)) == bits(expected[:rows])).all(), rows


@compiled
@pytest.mark.parametrize("isa", [name for name in SETS if name != "generic"])
@pytest.mark.parametrize("name", TYPES)
def test_long_prefills_equal_single_rows(name, isa, cases):
    raw, x, _ = cases[name]
    packed = kernels.pack(name, raw, 512)
    whole = run(isa, x, packed)
    for row in (0, 1, 239, 240, 241, 479, 480, 511):
        assert (bits(whole[row]) == bits(run(isa, x[row : row + 1], packed)[0])).all(), row


@compiled
@pytest.mark.parametrize("name", [name for name in TYPES if name != "F32"])
def test_packed_weights_equal_their_unpacked_copy(name, cases):
    raw, x, _ = cases[name]
    packed = kernels.pack(name, raw, 512)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    unpacked = kernels.pack("F32", np.ascontiguousarray(values).view(np.uint8), 512)
    for isa in SETS:
        for rows in (1, 4, 11):
            assert (bits(run(isa, x[:rows], packed)) == bits(run(isa, x[:rows], unpacked))).all()


@compiled
@pytest.mark.parametrize("isa", SETS)
def test_odd_shapes(isa):
    rng = np.random.default_rng(3)
    shapes = [("F32", 1, 1), ("F32", 31, 3), ("F16", 33, 5), ("BF16", 65, 7), ("BF16", 2, 1), ("F32", 40, 129)]
    shapes += [("Q4_1", 1, 32), ("Q5_0", 97, 96), ("Q8_0", 130, 160), ("Q6_K", 5, 256), ("Q5_K", 64, 768)]
    for name, outputs, inputs in shapes:
        raw = raw_weights(rng, name, outputs, inputs)
        packed = kernels.pack(name, raw, inputs)
        x = rng.standard_normal((19, inputs)).astype(np.float32)
        expected = reference.multiply(x, reference.dequantise(name, raw).T.copy())
        for rows in (1, 2, 5, 19):
            assert (bits(run(isa, x[:rows], packed)) == bits(expected[:rows])).all(), (name, outputs, inputs, rows)


@compiled
def test_bias_is_one_addition_after_the_sum():
    rng = np.random.default_rng(4)
    raw = raw_weights(rng, "Q4_1", 75, 64)
    packed, bias = kernels.pack("Q4_1", raw, 64), rng.standard_normal(75).astype(np.float32)
    x = rng.standard_normal((14, 64)).astype(np.float32)
    for isa in SETS:
        for rows in (1, 3, 14):
            plain = run(isa, x[:rows], packed)
            assert (bits(run(isa, x[:rows], packed, bias)) == bits(plain + bias)).all()
    assert (bits(kernels.linear(x, packed, bias=bias)) == bits(reference.linear(x, packed, bias))).all()


@compiled
def test_values_at_the_edges_of_float32():
    """Denormal products and sums, overflow, infinities, NaN and signed zeros: the same bits everywhere (NaN as NaN)."""
    rng = np.random.default_rng(5)
    pool = np.array([0, -0.0, 1e-45, -1e-45, 1e-38, -3e-39, 1e-20, 1e20, 3e38, -3e38, 1, -1, np.inf], np.float32)
    w, x = (rng.choice(pool[:12], (64, 40)) for _ in range(2))
    w[5, 7], x[3, 9], x[4, 0] = np.inf, np.nan, -np.inf
    packed = kernels.pack("F32", np.ascontiguousarray(w).view(np.uint8), 40)
    expected = reference.multiply(np.ascontiguousarray(x), w.T.copy())
    assert (np.abs(expected[np.isfinite(expected)]) < 1e-38).any()
    for isa in SETS:
        for rows in (1, 2, 5, 64):
            found = run(isa, x[:rows], packed)
            assert (np.isnan(found) == np.isnan(expected[:rows])).all()
            real = ~np.isnan(found)
            assert (bits(found)[real] == bits(expected[:rows])[real]).all()


@compiled
def test_stacking_and_row_order():
    rng = np.random.default_rng(6)
    parts = [raw_weights(rng, "Q4_K", rows, 256) for rows in (20, 5, 40)]
    joined = np.concatenate(parts)
    order = rng.permutation(65)[:50]
    assert (kernels.pack_stacked("Q4_K", parts, 256).data == kernels.pack("Q4_K", joined, 256).data).all()
    ordered = kernels.pack_stacked("Q4_K", parts, 256, order)
    assert (ordered.data == kernels.pack("Q4_K", joined[order], 256).data).all()


def test_memory_mapped_rows_at_any_alignment(tmp_path):
    raw = raw_weights(np.random.default_rng(7), "Q6_K", 33, 256)
    (tmp_path / "file").write_bytes(b"abc" + raw.tobytes())
    mapped = np.memmap(tmp_path / "file", np.uint8, "r", offset=3, shape=raw.shape)
    assert (kernels.pack("Q6_K", mapped, 256).data == kernels.pack("Q6_K", raw, 256).data).all()


def test_quantised_weights_stay_quantised():
    for name, (span, size) in BLOCKS.items():
        raw = raw_weights(np.random.default_rng(8), name, 64, 512)
        assert kernels.pack(name, raw, 512).nbytes <= raw.nbytes * 1.03, (name, span, size)


def test_bad_input_is_refused_by_name():
    raw = raw_weights(np.random.default_rng(9), "Q4_K", 8, 512)
    with pytest.raises(InputError, match="Q4_K weights need a multiple of 256 inputs, not 288"):
        kernels.pack("Q4_K", raw, 288)
    with pytest.raises(InputError, match="'IQ2_S' is not supported"):
        kernels.pack("IQ2_S", raw, 512)
    with pytest.raises(InputError, match=r"uint8 \[rows, 144\]"):
        kernels.pack("Q4_K", raw, 256)
    with pytest.raises(InputError, match=r"rows outside 0 \.\. 7"):
        kernels.pack("Q4_K", raw, 512, order=np.array([0, 8]))
    packed = kernels.pack("Q4_K", raw, 512)
    with pytest.raises(InputError, match=r"the weights take \[rows, 512\]"):
        kernels.linear(np.zeros((2, 256), np.float32), packed)
    with pytest.raises(InputError, match="rows must lie in 0"):
        kernels.unpack_rows(packed, [8])


@compiled
def test_panels_can_be_kept_and_mapped_again(tmp_path):
    rng = np.random.default_rng(10)
    packed = kernels.pack("Q5_1", raw_weights(rng, "Q5_1", 40, 64), 64)
    packed.data.tofile(tmp_path / "panels")
    mapped = np.memmap(tmp_path / "panels", np.uint8, "r")
    again = kernels.from_panels("Q5_1", packed.shape, mapped)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    assert (bits(kernels.linear(x, again)) == bits(kernels.linear(x, packed))).all()
    with pytest.raises(InputError, match="wrong size"):
        kernels.from_panels("Q5_1", packed.shape, mapped[:-64])


# The twin itself, and faults that the comparisons above must see.


def exact_fma(a, b, c):
    """By rational arithmetic."""
    from fractions import Fraction

    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))


def test_the_twin_rounds_once():
    rng = np.random.default_rng(12)
    a = (1 + rng.integers(0, 1 << 12, 4000) / (1 << 12)).astype(np.float32)
    b = (1 + rng.integers(0, 1 << 12, 4000) / (1 << 12)).astype(np.float32)
    c = (rng.standard_normal(4000) * 2.0 ** rng.integers(-60, 30, 4000)).astype(np.float32)
    a[::5] *= np.float32(2.0**-70)
    b[::5] *= np.float32(2.0**-70)
    c[::5] = np.float32(1e-45) * rng.integers(-4, 4, 800)
    found = reference.fma(a, b, c)
    assert all(found[k] == exact_fma(a[k], b[k], c[k]) for k in range(4000))
    naive = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (naive != found).any(), "the inputs must contain cases where rounding twice is wrong"


def planted(order, rounding):
    """A twin that sums in another order or rounds the product."""

    def multiply(x, columns):
        total = np.zeros((len(x), columns.shape[1]), np.float32)
        for i in order(columns.shape[0]):
            rounded = total + x[:, i, None] * columns[i]
            total = rounded if rounding else reference.fma(x[:, i, None], columns[i], total)
        return total

    return multiply


@compiled
@pytest.mark.parametrize(
    "fault",
    [
        planted(lambda n: range(n - 1, -1, -1), False),
        planted(lambda n: [*range(0, n, 2), *range(1, n, 2)], False),
        planted(range, True),
    ],
    ids=["backwards", "two chains", "product rounded"],
)
def test_planted_order_and_rounding_faults_are_seen(fault, cases):
    raw, x, expected = cases["Q4_1"]
    wrong = fault(x[:4], reference.dequantise("Q4_1", raw).T.copy())
    assert np.allclose(wrong, expected[:4], rtol=1e-3, atol=1e-3)
    assert (bits(run(SETS[0], x[:4], kernels.pack("Q4_1", raw, 512))) != bits(wrong)).any()


@compiled
def test_planted_unpacking_fault_is_seen(cases):
    raw, x, expected = cases["Q6_K"]
    damaged = raw.copy()
    damaged[40, 0] ^= 16  # one bit of one weight
    found = run(SETS[0], x[:2], kernels.pack("Q6_K", damaged, 512))
    different = bits(found) != bits(expected[:2])
    assert different[:, 40].any()
    assert not np.delete(different, 40, axis=1).any()
