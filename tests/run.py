"""All checks in one command: style, types, tests. `--full` adds the long ones."""

import subprocess
import sys
import time

FULL = "--full" in sys.argv[1:]
CHECKS = [
    ("style", ["ruff", "check", "src", "tests", "bench"]),
    ("format", ["ruff", "format", "--check", "src", "tests", "bench"]),
    ("types", ["mypy"]),
    ("tests", ["pytest"] + ([] if FULL else ["-m", "not full"])),
]


def main() -> int:
    failed = []
    for name, command in CHECKS:
        start = time.perf_counter()
        code = subprocess.run([sys.executable, "-m", *command], check=False).returncode
        print(f"[{name}] {'ok' if code == 0 else 'FAILED'} in {time.perf_counter() - start:.0f} s", flush=True)
        if code:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
