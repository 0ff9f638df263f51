"""The examples run, and end with what they promise."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_digits_trains_both_networks_to_the_bits_of_the_plain_device(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes: every loss and every weight, bit for bit") == 2
    for name in ("conv net", "transformer"):
        assert f"{name}, offload  epoch  1/1" in done.stdout
