"""Threads and the choice of kernels change no result; forks, neighbours and idle threads do no harm."""

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kernel_weights import bits, raw_weights
from slipstream import kernels
from slipstream.core.errors import InputError
from slipstream.kernels import measure, native

CSRC = Path(__file__).resolve().parent.parent / "csrc"
pytestmark = pytest.mark.skipif(native.core is None, reason="built without a compiler")


@pytest.fixture(autouse=True)
def restore_threads():
    before = native.threads()
    yield
    kernels.set_threads(before)


def work(seed=0, rows=4, outputs=3000):
    rng = np.random.default_rng(seed)
    packed = kernels.pack("Q4_1", raw_weights(rng, "Q4_1", outputs, 256), 256)
    return rng.standard_normal((rows, 256)).astype(np.float32), packed


def python(code, **env):
    """Runs `code` in a new process."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": os.path.dirname(__file__), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


DIGEST = """
import hashlib, numpy as np
from kernel_weights import raw_weights
from slipstream import kernels
rng = np.random.default_rng(0)
digest = hashlib.sha256()
for name in ("F32", "BF16", "Q8_0", "Q4_1", "Q4_K", "Q6_K"):
    packed = kernels.pack(name, raw_weights(rng, name, 70, 256), 256)
    x = rng.standard_normal((9, 256)).astype(np.float32)
    digest.update(kernels.linear(x, packed).tobytes() + kernels.unpack_rows(packed, [3, 69]).tobytes())
print(kernels.info()["kernels"], kernels.info()["threads"], digest.hexdigest())
"""


def test_every_choice_of_kernels_gives_the_same_bits():
    lines = {}
    for choice in kernels.info()["available"]:
        done = python(DIGEST, SLIPSTREAM_KERNELS=choice, SLIPSTREAM_THREADS="3")
        name, threads, digest = done.stdout.split()
        assert (name, threads) == (choice, "1" if choice == "numpy" else "3")
        lines[choice] = digest
    assert len(lines) >= 2
    assert len(set(lines.values())) == 1, lines


ANSWERS = """
import sys
import beds, native_beds
from slipstream.core.params import SamplingParams
from slipstream.drafters.recycling import Recycling
from slipstream.drafters.suffix import Suffix
from slipstream.kernels import sampling
target = native_beds.target("qwen2")
made = beds.engine(target, [Suffix(), Recycling(101)], shape="tree", tokenizer=beds.Pieces([b"x"] * 101))
shown = dict(max_tokens=12, ignore_eos=True, logprobs=2, seed=3)
for rules in ({}, dict(temperature=0.9, top_p=0.9), dict(temperature=1.3, min_p=0.02, repetition_penalty=1.2)):
    print(made.run([made.add(native_beds.tokens(20), SamplingParams(**shown, **rules))])[0].outputs[0].logprobs)
print(sampling.core is None, "slipstream.kernels._core" in sys.modules)
"""


def test_every_choice_of_kernels_gives_the_same_answers():
    """Through the whole engine; numpy means numpy everywhere, sampling too."""
    answers = {}
    for choice in kernels.info()["available"]:
        done = python(ANSWERS, SLIPSTREAM_KERNELS=choice)
        *answers[choice], compiled = done.stdout.splitlines()
        assert compiled == ("True False" if choice == "numpy" else "False True")
    assert len(answers["numpy"]) == 3
    assert all(lines == answers["numpy"] for lines in answers.values()), answers


def test_bad_choices_are_refused_in_one_line():
    done = python("import slipstream.kernels", SLIPSTREAM_KERNELS="sse9")
    assert "InputError: SLIPSTREAM_KERNELS='sse9' cannot run here; use one of auto, " in done.stderr
    for value in ("0", "many", "257"):
        done = python("import slipstream.kernels", SLIPSTREAM_THREADS=value)
        assert f"InputError: SLIPSTREAM_THREADS={value!r} is not a number of threads; use 1 to 256" in done.stderr
    with pytest.raises(InputError, match="threads=0"):
        kernels.set_threads(0)


def test_any_number_of_threads_gives_the_same_bits():
    x, packed = work()
    kernels.set_threads(1)
    expected = kernels.linear(x, packed)
    for count in (2, 3, 7, 2, 1):
        kernels.set_threads(count)
        assert native.threads() == count
        for _ in range(20):
            assert (bits(kernels.linear(x, packed)) == bits(expected)).all()


def test_callers_at_once_share_the_pool():
    kernels.set_threads(3)
    cases = [work(seed, rows) for seed, rows in enumerate((1, 3, 8, 20))]
    expected = [bits(kernels.linear(x, packed)) for x, packed in cases]
    wrong = []

    def call(k):
        wrong.extend(k for _ in range(150) if (bits(kernels.linear(*cases[k])) != expected[k]).any())

    callers = [threading.Thread(target=call, args=(k,), daemon=True) for k in range(len(cases))]
    for caller in callers:
        caller.start()
    for count in (1, 4, 2, 3):  # and the pool changes under them
        kernels.set_threads(count)
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert wrong == []


FORK = """
import os, sys, numpy as np
from kernel_weights import raw_weights
from slipstream import kernels
kernels.set_threads(3)
rng = np.random.default_rng(0)
packed = kernels.pack("Q4_1", raw_weights(rng, "Q4_1", 3000, 256), 256)
x = rng.standard_normal((4, 256)).astype(np.float32)
expected = kernels.linear(x, packed)
for depth in range(2):
    child = os.fork()
    if child == 0:
        assert kernels.info()["threads"] == 3
        assert all((kernels.linear(x, packed) == expected).all() for _ in range(20))
        continue
    _, status = os.waitpid(child, 0)
    same = all((kernels.linear(x, packed) == expected).all() for _ in range(20))
    sys.stdout.flush()
    os._exit(0 if status == 0 and same else 1)
os._exit(0)
"""


def test_children_of_a_fork_compute_with_threads_of_their_own():
    done = python(FORK)
    assert done.returncode == 0, done.stderr


def test_idle_threads_sleep():
    x, packed = work()
    kernels.set_threads(4)
    kernels.linear(x, packed)
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


BUSY = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"


@pytest.mark.full
def test_busy_neighbours_do_not_bring_the_pool_to_a_halt():
    """Two busy processes on few cores: a pass takes its fair share of time, not a hundred times more."""
    x, packed = work(rows=8, outputs=40000)

    def median():
        times = []
        for _ in range(60):
            start = time.perf_counter()
            kernels.linear(x, packed)
            times.append(time.perf_counter() - start)
        return sorted(times)[30]

    alone = median()
    neighbours = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        time.sleep(0.3)
        shared = median()
    finally:
        for process in neighbours:
            process.kill()
            process.wait()
    assert shared < 8 * alone + 0.01, (alone, shared)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="sets the mode of x86 by glibc")
def test_denormals_are_kept_whatever_the_caller_set():
    libm = ctypes.CDLL("libm.so.6")
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((3, 64)) * 1e-25).astype(np.float32)
    w = (rng.standard_normal((200, 64)) * 1e-16).astype(np.float32)
    packed = kernels.pack("F32", w.view(np.uint8), 64)
    expected = bits(kernels.linear(x, packed))
    assert (expected & 0x7FFFFFFF).all()
    saved, flushing = (ctypes.create_string_buffer(64) for _ in range(2))
    libm.fegetenv(saved)
    control = int.from_bytes(saved.raw[28:32], "little") | 0x8040  # flush to zero, denormals are zero
    flushing.raw = saved.raw[:28] + control.to_bytes(4, "little") + saved.raw[32:]
    after = ctypes.create_string_buffer(64)
    for threads in (1, 3):
        kernels.set_threads(threads)
        out = np.empty((3, 200), np.float32)
        libm.fesetenv(flushing)
        try:
            native.core.linear(x, packed.handle, out, None)
            libm.fegetenv(after)
        finally:
            libm.fesetenv(saved)
        assert int.from_bytes(after.raw[28:32], "little") & 0x8040 == 0x8040, "the caller's mode is restored"
        assert (bits(out) == expected).all()


def test_measurements_are_plausible():
    assert 0.5 < kernels.read_bandwidth(megabytes=64, repeats=2) < 5000
    assert 1 <= kernels.choose_threads() <= native.core.usable_cores()
    json.dumps(kernels.info())


def test_threads_are_measured_once_unless_named(monkeypatch):
    monkeypatch.setattr(measure, "choose_threads", lambda: asked.append(1) or 1)
    for settled, times in ((False, 1), (True, 0)):
        asked: list[int] = []
        monkeypatch.setattr(native, "threads_settled", settled)
        before = kernels.info()["threads"]
        measure.settle_threads()
        measure.settle_threads()
        assert len(asked) == times
        kernels.set_threads(before)
        assert native.threads_settled


@pytest.mark.full
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs Debian's qemu-user")
@pytest.mark.parametrize(("cpu", "kernels_of_it"), [("SandyBridge", "generic"), ("Haswell", "avx2")])
def test_older_processors_compute_the_same_bits(cpu, kernels_of_it):
    """No instruction of a wider set runs before or beside the choice: an emulated CPU without it would stop."""
    here = python(DIGEST, SLIPSTREAM_THREADS="2").stdout.split()
    command = ["qemu-x86_64", "-cpu", cpu, sys.executable, "-c", DIGEST]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__), "SLIPSTREAM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == [kernels_of_it, *here[1:]], done.stderr


ENDS_IN_A_KERNEL = """
import threading, time
import numpy as np
from slipstream import kernels
packed = kernels.pack("F32", np.ones((2048, 1024), np.uint8), 256)
def compute():
    while True:
        kernels.linear(np.ones((4, 256), np.float32), packed)
threading.Thread(target=compute, daemon=True).start()
time.sleep(0.05)
"""


def test_a_process_that_ends_while_a_thread_computes_ends_in_peace():
    for count in ("1", "2", "3"):
        done = python(ENDS_IN_A_KERNEL, SLIPSTREAM_THREADS=count)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("planted", [False, True])
def test_planted_jobs_beside_work_left_aside_are_seen(tmp_path, planted):
    """Nor may what such work throws end the process. Planted: jobs that begin whatever was left aside."""
    source = (CSRC / "pool.cpp").read_text()
    if planted:
        source, before = source.replace("if (!is_inside) impl.settle_aside();", ""), source
        assert source != before
    (tmp_path / "pool.cpp").write_text(source)
    command = ["g++", "-std=c++20", "-O1", "-pthread", f"-I{CSRC}", tmp_path / "pool.cpp", "-x", "c++", "-"]
    check = (CSRC / "check" / "pool_aside.cpp").read_text().replace("../pool.h", "pool.h")
    subprocess.run([*command, "-o", tmp_path / "check"], input=check, text=True, check=True, timeout=120)
    done = subprocess.run([tmp_path / "check"], capture_output=True, text=True, timeout=60, check=False)
    thrown, beside, undone = (int(part.split()[0]) for part in done.stdout.split(","))
    assert (thrown, undone) == (200, 0)
    assert (beside > 0) == planted == (done.returncode != 0)
