"""Options, the worker processes and the record of a run."""

import json
import os
from pathlib import Path

import pytest
import torch
from helpers import GPU
from pool import Pool, link

FAST_SAMPLES = 2
FAST_LIMIT = 60.0  # seconds for an entry
WHOLE_LIMIT = 300.0

answers: dict[str, dict] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("opinfo", "PyTorch's op database")
    group.addoption("--whole", action="store_true", help="all samples of every entry, not the smallest few")
    group.addoption("--record", type=Path, help="write what was found to this file")
    group.addoption("--part", default="1/1", help="of every N entries the K-th alone: K/N", metavar="K/N")


def pytest_configure(config: pytest.Config) -> None:
    # Under pytest-xdist every process has one worker; alone it has one for each core.
    workers = 1 if hasattr(config, "workerinput") else min(12, len(os.sched_getaffinity(0)))
    whole = config.getoption("--whole", default=False)
    config.opinfo_pool = Pool(workers, None if whole else FAST_SAMPLES, WHOLE_LIMIT if whole else FAST_LIMIT)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.opinfo_pool.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "entry_name" in metafunc.fixturenames:
        part, parts = map(int, metafunc.config.getoption("--part").split("/"))
        metafunc.parametrize("entry_name", metafunc.config.opinfo_pool.names()[part - 1 :: parts])


@pytest.fixture(scope="session")
def look(request: pytest.FixtureRequest):
    """Looks at an entry. Those that come later are under way meanwhile, unless pytest-xdist deals them out."""
    pool = request.config.opinfo_pool
    ahead = {}
    if not hasattr(request.config, "workerinput"):
        names = [item.callspec.params["entry_name"] for item in request.session.items if "look" in item.fixturenames]
        ahead = {name: pool.submit(name) for name in names}
    return lambda name: (ahead.get(name) or pool.submit(name)).result()


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    answers.update(value for key, value in report.user_properties if key == "opinfo" and report.when == "call")


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--record", default=None)
    if file is None or hasattr(session.config, "workerinput"):
        return
    device = torch.cuda.get_device_name() if GPU else f"CPU, link {link()}"
    whole = session.config.getoption("--whole")
    record = {"torch": torch.__version__, "device": device, "gpu": GPU, "whole": whole, "entries": answers}
    record["of"] = len(session.config.opinfo_pool.names())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")
