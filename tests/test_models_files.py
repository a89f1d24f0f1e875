"""Reading model files: GGUF and safetensors agree, wrong files end in one clear line."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from model_files import HEADS, gguf_name, permuted, random_weights, write_folder, write_gguf
from slipstream.core.errors import ModelError, SlipstreamError, UnsupportedError
from slipstream.kernels.packed import BLOCKS
from slipstream.models.chat import chat_prompt
from slipstream.models.files import ModelFile, open_model
from slipstream.models.safetensors_file import SafetensorsFile
from slipstream.models.tensor import Tensor

QUANTISABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def read_everything(path: Path) -> ModelFile:
    """Use all of a model file that can be damaged."""
    model = open_model(path)
    for name in model.names():
        model.tensor(name).float32()
    tokenizer = model.tokenizer()
    tokenizer.decode(tokenizer.encode("hello world <|im_end|>"))
    tokenizer.fingerprint()
    if model.chat_template:
        chat_prompt(model, [{"role": "user", "content": "hello"}])
    return model


def test_gguf_and_folder_hold_the_same_model(tmp_path):
    gguf, folder = open_model(write_gguf(tmp_path / "m.gguf")), open_model(write_folder(tmp_path / "hf"))
    weights = random_weights()
    assert set(gguf.names()) == set(folder.names()) == set(weights)
    for name, weight in weights.items():
        for model in (gguf, folder):
            tensor = model.tensor(name)
            assert tensor.type == "F32"
            assert tensor.raw.shape == (weight.reshape(-1, weight.shape[-1]).shape[0], weight.shape[-1] * 4)
            np.testing.assert_array_equal(tensor.float32(), weight)
    size = sum(weight.nbytes for weight in weights.values())
    assert gguf.weights_bytes == folder.weights_bytes == size
    assert gguf.weight_types == folder.weight_types == "F32"
    assert gguf.chat_template == folder.chat_template
    assert (gguf.name, folder.name) == ("m", "hf")


def test_planted_missing_unpermutation_is_seen(tmp_path):
    gguf = open_model(write_gguf(tmp_path / "m.gguf"))
    name = "model.layers.0.self_attn.q_proj.weight"
    original = random_weights()[name]
    as_stored = gguf.file.tensor(gguf_name(name)).float32()
    assert not np.array_equal(as_stored, original)
    np.testing.assert_array_equal(as_stored, permuted(original, HEADS))


def test_qwen2_rows_are_not_permuted(tmp_path):
    gguf = open_model(write_gguf(tmp_path / "m.gguf", architecture="qwen2"))
    for name, weight in random_weights().items():
        np.testing.assert_array_equal(gguf.tensor(name).float32(), weight)


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_quantised_rows_stay_whole(tmp_path, kind):
    from gguf import GGMLQuantizationType, quants

    name = "model.layers.1.self_attn.k_proj.weight"
    model = open_model(write_gguf(tmp_path / "m.gguf", types={gguf_name(name): kind}))
    tensor, weight = model.tensor(name), random_weights()[name]
    assert tensor.type == kind
    assert tensor.raw.shape == (weight.shape[0], weight.shape[1] // BLOCKS[kind][0] * BLOCKS[kind][1])
    np.testing.assert_array_equal(tensor.raw, quants.quantize(weight, GGMLQuantizationType[kind]))
    assert np.abs(tensor.float32() - weight).max() < 0.5
    assert kind in model.weight_types


@pytest.mark.parametrize("kind", BLOCKS)
def test_unpacking_equals_the_gguf_library(kind):
    from gguf import GGMLQuantizationType, quants

    make = np.random.default_rng(3)
    values, size = BLOCKS[kind]
    raw = make.integers(0, 60, (4, 512 // values * size), dtype=np.uint8)  # small bytes: no infinities
    expected = quants.dequantize(raw, GGMLQuantizationType[kind])
    unpacked = Tensor(kind, (4, 512), raw).float32()
    np.testing.assert_array_equal(unpacked, expected)
    assert unpacked.shape == (4, 512)


def test_reordering_a_vector():
    tensor = Tensor("F32", (4,), np.arange(4, dtype=np.float32).view(np.uint8).reshape(1, -1))
    np.testing.assert_array_equal(tensor.take_rows(np.array([2, 0, 3, 1])).float32(), [2, 0, 3, 1])


def test_version_2_is_read_and_others_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    for version, message in ((1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")):
        data[4:8] = struct.pack("<I", version)
        path.write_bytes(data)
        with pytest.raises(UnsupportedError, match=message):
            open_model(path)
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    assert read_everything(path).file.version == 2


def test_unsupported_tensor_type_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    path.write_bytes(data[:at] + struct.pack("<I", 20) + data[at + 4 :])
    model = open_model(path)
    with pytest.raises(UnsupportedError, match="IQ4_NL"):
        model.tensor("model.layers.0.mlp.up_proj.weight")


def test_split_files_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="llama-gguf-split"):
        open_model(write_gguf(tmp_path / "m.gguf", extra={"split.count": 3}))


def test_damaged_gguf_cut_off_anywhere(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    ends = [*range(0, 400, 7), *range(400, len(data), 1009), len(data) - 1]
    for end in ends:
        path.write_bytes(data[:end])
        with pytest.raises(ModelError, match=r"m\.gguf") as caught:
            read_everything(path)
        assert "\n" not in str(caught.value)


def test_damaged_gguf_with_wrong_bytes(tmp_path):
    """Any byte of metadata and tensor table may be wrong: the file is read or refused, within reasonable memory."""
    path = write_gguf(tmp_path / "m.gguf", types={"token_embd.weight": "Q8_0"})
    data = path.read_bytes()
    described = len(data) - open_model(path).weights_bytes
    make = random.Random(5)
    messages = []
    tracemalloc.start()
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(make.choice([1, 1, 2, 6])):
            damaged[make.randrange(described)] = make.choice([0, 1, 0x7F, 0xFF, make.randrange(256)])
        path.write_bytes(damaged)
        try:
            read_everything(path)
        except SlipstreamError as error:
            messages.append(str(error))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(messages) > 100
    assert [message for message in messages if len(message.splitlines()) != 1] == []
    assert peak < 50_000_000


def test_foreign_and_missing_files(tmp_path):
    foreign = tmp_path / "notes.txt"
    foreign.write_text("These are my notes, and no model at all.")
    with pytest.raises(ModelError, match="not a GGUF file"):
        open_model(foreign)
    with pytest.raises(ModelError, match="no such file"):
        open_model(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match=r"neither config\.json nor a GGUF"):
        open_model(tmp_path)
    write_gguf(tmp_path / "a.gguf")
    assert open_model(tmp_path).name == "a"
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match="2 GGUF files"):
        open_model(tmp_path)


def test_shards_are_joined_and_a_missing_one_is_named(tmp_path):
    folder = write_folder(tmp_path / "hf", shards=3)
    model = open_model(folder)
    for name, weight in random_weights().items():
        np.testing.assert_array_equal(model.tensor(name).float32(), weight)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00003"):
        open_model(folder)


@pytest.mark.parametrize("owner", ["../other.safetensors", "/etc/passwd", "..", 7])
def test_index_cannot_point_out_of_the_folder(tmp_path, owner):
    folder = write_folder(tmp_path / "hf", shards=2)
    index = {"weight_map": {"model.norm.weight": owner}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="weight_map"):
        open_model(folder)


def write_safetensors(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_bf16_and_f16_in_safetensors(tmp_path):
    values = np.array([[1.5, -2.0, 0.0078125], [3.0, 1e-3, 65504.0]], dtype=np.float32)
    brain = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    half = values.astype(np.float16).tobytes()
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b": {"dtype": "F16", "shape": [2, 3], "data_offsets": [12, 24]},
        "c": {"dtype": "I64", "shape": [1], "data_offsets": [24, 32]},
    }
    file = SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", header, brain + half + bytes(8)))
    truncated = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(file.tensor("a").float32(), truncated)
    np.testing.assert_array_equal(file.tensor("b").float32(), values.astype(np.float16).astype(np.float32))
    with pytest.raises(UnsupportedError, match="I64"):
        file.tensor("c")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        [],
        {"a": []},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a": {"dtype": "F32", "shape": [-1, 2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]}},
    ],
)
def test_damaged_safetensors_header(tmp_path, header):
    with pytest.raises(ModelError, match="damaged safetensors"):
        SafetensorsFile(write_safetensors(tmp_path / "m.safetensors", header, bytes(8)))


def test_damaged_safetensors_length(tmp_path):
    path = tmp_path / "m.safetensors"
    for content in (b"", b"short", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 9) + b"{}"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"m\.safetensors"):
            SafetensorsFile(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_or_damaged_file_of_a_folder_is_named(tmp_path, name):
    folder = write_folder(tmp_path / "hf")
    for content in ("[1]", '{"model', None):
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content)
        with pytest.raises(ModelError, match=name.replace(".", r"\.") if content or name != "config.json" else "hf"):
            open_model(folder)


@pytest.mark.parametrize("change", ["vocab", "added", "content", "types"])
def test_damaged_tokenizer_json(tmp_path, change):
    folder = write_folder(tmp_path / "hf")
    description = json.loads((folder / "tokenizer.json").read_text())
    if change == "vocab":
        description["model"]["vocab"] = {"a": "0"}
    elif change == "added":
        description["added_tokens"] = [{"id": 3}]
    elif change == "content":
        description["added_tokens"][0]["content"] = None
    else:
        description["model"] = None
    (folder / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        open_model(folder)


@pytest.mark.model
def test_smollm2_opens_at_once():
    """The time is the best of three, far below the second that reading every entry as an object takes."""
    import time

    from slipstream.models.registry import ensure

    path = ensure("smollm2", quiet=True)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model = open_model(path)
        model.tokenizer()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.8
    assert (model.config.num_layers, model.config.vocab_size, model.config.end_ids) == (30, 49152, (0, 2))
    assert model.config.tie_embeddings
