"""README's example prints what README says that it prints."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_prints_what_it_says(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    program = tmp_path / "example.py"
    program.write_text(found[1])
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == found[2]
