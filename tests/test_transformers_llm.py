"""Which runtime runs a model: chosen, stated, refused; folders of every architecture behind LLM."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys

import pytest

import beds
from slipstream import LLM, SamplingParams
from slipstream.cli import main
from slipstream.core.errors import InputError, ModelError, UnsupportedError
from slipstream.models.files import open_model
from slipstream.targets.runtime import choose, load


def test_torch_is_not_imported_unless_its_runtime_is_chosen():
    code = "import slipstream, slipstream.llm, slipstream.cli.app, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_torch_is_one_line_with_its_remedy(monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "torch":
            raise ImportError("No module named 'torch'", name="torch")
        return imported(name, *args, **kwargs)

    choice = choose(beds.SmallFile())
    assert choice.name == "transformers"
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModelError, match=r"needs torch; install it with .* -m pip install 'slipstream\[torch\]' "):
        load(beds.SmallFile(), choice, None, 4, None)


def test_settings_that_contradict_each_other_are_refused():
    file = beds.SmallFile()
    with pytest.raises(InputError, match="unknown runtime 'vllm'"):
        choose(file, "vllm")
    with pytest.raises(InputError, match="native runtime has no device cuda"):
        choose(file, "native", device="cuda")
    with pytest.raises(UnsupportedError, match="architecture 'table'"):
        choose(file, "native")
    assert choose(file, None, "cuda").reason == "device cuda asked for"
    assert choose(file, None, None, "bfloat16").name == "transformers"
    assert "architecture 'table'" in choose(file).reason


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    torch_beds = pytest.importorskip("torch_beds", reason="needs torch: pip install 'slipstream[torch]'")
    made = {}
    for family in ("llama", "gpt2", "falcon-mqa", "mistral-window"):
        made[family] = torch_beds.save(torch_beds.tiny(family), tmp_path_factory.mktemp(family))
    return made


@pytest.mark.parametrize(
    ("family", "runtime", "reason"),
    [
        ("llama", "native", "Llama family"),
        ("gpt2", "transformers", "architecture 'gpt2'"),
        ("falcon-mqa", "transformers", "architecture 'falcon'"),
        ("mistral-window", "transformers", "sliding window (8)"),
    ],
)
def test_native_where_it_can_and_transformers_otherwise(folders, family, runtime, reason):
    choice = choose(open_model(folders[family]))
    assert choice.name == runtime
    assert reason in choice.reason


def test_both_runtimes_answer_alike(folders):
    prompts = [{"prompt_token_ids": [3, 4, 5] * 5}, {"prompt_token_ids": [9, 8]}]
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=3)
    answers = {}
    for runtime in ("native", "transformers"):
        with LLM(folders["llama"], draft="suffix", runtime=runtime) as llm:
            assert f"{runtime} on cpu (asked for)" in llm.describe()
            results = llm.generate(prompts, params)
            answers[runtime] = [result.outputs[0].token_ids for result in results]
            plain = llm.generate(prompts, params, speculation=False)
            assert [result.outputs[0].token_ids for result in plain] == answers[runtime]
    assert answers["native"] == answers["transformers"]


def test_a_draft_model_of_another_architecture(folders):
    prompt = {"prompt_token_ids": [3, 4, 5] * 5}
    with LLM(folders["llama"], draft=f"model:{folders['gpt2']}", controller="fixed") as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=20))[0].outputs[0]
        assert output.speculation.num_draft_tokens > 0
        assert output.speculation.drafter_failures == 0
        assert llm.generate(prompt, SamplingParams(max_tokens=20), speculation=False)[0].outputs[0].token_ids == (
            output.token_ids
        )


def test_a_model_that_drafts_for_itself_is_loaded_once(folders, monkeypatch):
    model = pytest.importorskip("slipstream.targets.transformers.model")
    loaded, prompt, params = [], {"prompt_token_ids": [3, 4, 5] * 5}, SamplingParams(max_tokens=20)
    load_model = model.load_model
    monkeypatch.setattr(model, "load_model", lambda *given: loaded.append(given) or load_model(*given))
    draft = f"model:{folders['gpt2']}"
    with LLM(folders["gpt2"], draft, max_nodes=4, shape="chain", controller="fixed") as llm:
        for prompts in (prompt, [prompt, {"prompt_token_ids": [9, 8]}]):
            plain, drafted = (llm.generate(prompts, params, speculation=speculation) for speculation in (False, True))
            for one, other in zip(plain, drafted, strict=True):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
                assert other.outputs[0].speculation.num_steps == 4, "all but one of five tokens are drafted and right"
                assert other.outputs[0].speculation.drafter_failures == 0
    assert len(loaded) == 1


def test_info_says_which_runtime_and_why(folders, capsys):
    assert main(["info", str(folders["gpt2"]), "--no-measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runtime"] == "transformers"
    assert "architecture 'gpt2'" in found["runtime_reason"]
    assert "torch" in found["kernels"]
    assert main(["info", str(folders["llama"]), "--no-measure"]) == 0
    out = capsys.readouterr().out
    assert "native: architecture llama is of the Llama family" in out
    assert re.search(r"heads +on the host's CPU, \S+ kernels; none comes with the model", out)


def test_a_device_that_is_not_here_is_one_line(folders):
    if pytest.importorskip("torch").cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(InputError, match="device 'cuda' cannot be used"):
        LLM(folders["llama"], device="cuda")
    with pytest.raises(InputError, match="dtype is 'int3'"):
        LLM(folders["llama"], dtype="int3")


def test_bfloat16_runs(folders):
    with LLM(folders["llama"], dtype="bf16") as llm:
        assert (
            len(llm.generate({"prompt_token_ids": [3, 4]}, SamplingParams(max_tokens=8))[0].outputs[0].token_ids) == 8
        )
