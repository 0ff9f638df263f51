"""A setting that does nothing, or hurts, says so, in one sentence."""

import math
import re
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from helpers import GPU, HOST, OFFLOAD, passes, python, says

import torch_offload

pytestmark = pytest.mark.once

USE = """
    import torch, torch_offload
    print(torch.ones(64, 64, device="offload").sum().item())
"""


def told(program: str = USE, **settings: str) -> list[str]:
    """The sentences that a program is warned with."""
    done = python(program, **settings)
    assert done.returncode == 0, done.stderr
    return [line[line.index("offload: ") :] for line in done.stderr.splitlines() if "offload: " in line]


def test_nothing_is_said_without_need():
    assert (
        told(TORCH_OFFLOAD_LINK="sim", TORCH_OFFLOAD_BUDGET="4096", TORCH_OFFLOAD_SEED="3", TORCH_OFFLOAD_POISON="1")
        == []
    )


def test_a_misspelt_name():
    (sentence,) = told(TORCH_OFFLOAD_BUGDET="0", TORCH_OFFLOAD_RING="5", TORCH_OFFLOAD_LINK="sim")
    for word in ("TORCH_OFFLOAD_BUGDET", "TORCH_OFFLOAD_RING,", "does nothing", " BUDGET", " RING_BYTES"):
        assert word in sentence, (word, sentence)


def test_the_table_of_settings_is_whole():
    (sentence,) = told(TORCH_OFFLOAD_NONE="1", TORCH_OFFLOAD_LINK="sim")
    known = re.search(r"may follow: ([A-Z_, ]+)\.", sentence)[1].split(", ")
    table = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text().split("## Settings")[1]
    assert sorted(re.findall(r"^\| `TORCH_OFFLOAD_([A-Z_]+)", table, re.MULTILINE)) == known


def test_a_setting_of_a_cache_where_there_is_none():
    (sentence,) = told(
        TORCH_OFFLOAD_LINK="none",
        TORCH_OFFLOAD_SEED="",
        TORCH_OFFLOAD_BUDGET="4096",
        TORCH_OFFLOAD_EVICT="1",
        TORCH_OFFLOAD_RING_BYTES="",
    )
    assert "TORCH_OFFLOAD_BUDGET" in sentence
    assert "TORCH_OFFLOAD_EVICT" in sentence
    assert "RING" not in sentence
    assert "does nothing" in sentence


@pytest.mark.skipif(not HOST, reason="there is a cache")
@pytest.mark.parametrize("setting", [torch_offload.set_budget, torch_offload.set_ring_bytes])
def test_a_call_where_there_is_no_cache(setting):
    with pytest.warns(UserWarning, match=r"4096 bytes does nothing here.*no cache"):
        setting(4096)
    assert torch_offload.get_budget() == torch_offload.get_ring_bytes() == 0


@pytest.mark.skipif(not HOST, reason="there is a cache")
@pytest.mark.parametrize("name", ["gpu_steps", "autocast_copies"])
def test_a_way_to_use_the_cache_where_there_is_none(name):
    setting = getattr(torch_offload, f"set_{name}")
    with pytest.warns(UserWarning, match=rf"set_{name}\(True\) does nothing here.*no cache"):
        setting(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setting(False)


@pytest.mark.skipif(not HOST, reason="there is a cache")
def test_a_share_where_there_is_no_cache():
    with pytest.warns(UserWarning, match=r"a budget of 40% does nothing here.*no cache"):
        torch_offload.set_budget("40%")
    assert torch_offload.get_budget() == 0


@pytest.mark.parametrize("name", ["TORCH_OFFLOAD_SEED", "TORCH_OFFLOAD_SIM_DEVICES"])
@pytest.mark.parametrize(("link", "said"), [("sim", False), ("none", True), ("auto", True)])
def test_settings_of_the_simulation(name, link, said):
    sentences = told(
        **{"TORCH_OFFLOAD_SEED": "", "TORCH_OFFLOAD_SIM_DEVICES": "", name: "3", "TORCH_OFFLOAD_LINK": link}
    )
    assert len(sentences) == said
    for sentence in sentences:
        assert name in sentence
        assert "does nothing here" in sentence
        assert "TORCH_OFFLOAD_LINK=sim" in sentence


@pytest.mark.parametrize(("link", "setting", "devices"), [("sim", "3", 3), ("sim", "", 1), ("none", "3", 1)])
def test_simulated_devices(link, setting, devices):
    """The count is told before first use too, and is the same after it."""
    program = """
        import torch, torch_offload
        print(torch.offload.device_count(), torch_offload._C.in_use())
        last = torch.offload.device_count() - 1
        print(torch.ones(4, 4, device=f"offload:{last}").sum().item(), torch.offload.device_count())
        torch.offload.set_device(last)
    """
    said = passes(program, TORCH_OFFLOAD_LINK=link, TORCH_OFFLOAD_SIM_DEVICES=setting, CUDA_VISIBLE_DEVICES="")
    assert said.split() == [str(devices), "False", "16.0", str(devices)]


def test_an_automatic_budget_needs_no_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_offload.set_budget("auto")


@pytest.mark.parametrize("what", ["BUDGET", "RING_BYTES"])
def test_more_than_the_device_has(what):
    sentences = told(**{f"TORCH_OFFLOAD_{what}": str(1 << 50), "TORCH_OFFLOAD_LINK": "auto" if GPU else "sim"})
    assert len(sentences) == 1
    assert str(1 << 50) in sentences[0]
    assert "more than" in sentences[0]


@pytest.mark.skipif(HOST, reason="there is no cache")
def test_more_than_the_device_has_by_a_call():
    ring = torch_offload.get_ring_bytes()
    with pytest.warns(UserWarning, match="budget of 1125899906842624 bytes is more than"):
        torch_offload.set_budget(1 << 50)
    with pytest.warns(UserWarning, match="ring of 1125899906842624 bytes is more than"):
        torch_offload.set_ring_bytes(1 << 50)
    torch_offload.set_budget("auto")
    torch_offload.set_ring_bytes(ring)


def test_a_ring_that_is_too_small_for_a_weight_is_told_once():
    sentences = told(
        """
        import torch, torch_offload
        x = torch.ones(2, 64, device="cuda" if torch.cuda.is_available() else "cpu")
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to("offload")
        net(x).sum().backward()
        """,
        TORCH_OFFLOAD_LINK="auto" if GPU else "sim",
        TORCH_OFFLOAD_RING_BYTES="4096",
        TORCH_OFFLOAD_BUDGET="0",
    )
    assert len(sentences) == 1
    assert "16384 bytes" in sentences[0]
    assert "ring of 4096 bytes" in sentences[0]
    assert "set_ring_bytes" in sentences[0]


def test_a_ring_that_nobody_chose_is_no_reason_for_a_word():
    assert told("import torch, torch_offload; torch.ones(4, 4, device='offload') @ torch.ones(4, 4)") == []


NO_BYTES = [
    (-1, ValueError, "give bytes, 0 or more."),
    (1 << 63, ValueError, "give bytes, fewer than 2**63."),
    (1 << 70, ValueError, "give bytes, fewer than 2**63."),
    (2.5, TypeError, "give a number of bytes, as an int."),
    (1e9, TypeError, "give a number of bytes, as an int."),
    (True, TypeError, "give a number of bytes, as an int."),
    (b"1", TypeError, "give a number of bytes, as an int."),
]


@pytest.mark.parametrize(("value", "error", "advice"), NO_BYTES)
def test_what_is_no_number_of_bytes(value, error, advice):
    before = torch_offload.get_ring_bytes()
    says(error, f"offload: the ring is {value!r}; {advice}", lambda: torch_offload.set_ring_bytes(value))
    for name in ("min_bytes", "keep_bytes", "max_gpu_bytes", "max_host_bytes", "in_flight_bytes"):
        sentence = f"offload: {name} is {value!r}; {advice}"
        says(error, sentence, lambda name=name: torch_offload.saved_tensors(**{name: value}))
    advice = advice.replace("bytes, as an int", 'bytes, a share like "40%", or "auto"')
    says(error, f"offload: the budget is {value!r}; {advice}", lambda: torch_offload.set_budget(value))
    assert torch_offload.get_ring_bytes() == before


@pytest.mark.parametrize("value", ["1GB", "1", None])
def test_what_is_no_number_where_a_budget_may_be_something_else(value):
    sentence = f"is {value!r}; give a number of bytes, as an int."
    says(TypeError, f"offload: the ring {sentence}", lambda: torch_offload.set_ring_bytes(value))
    for name in ("min_bytes", "keep_bytes"):
        says(TypeError, f"offload: {name} {sentence}", lambda name=name: torch_offload.saved_tensors(**{name: value}))


@pytest.mark.filterwarnings("ignore:offload. a (ring|budget) of 4096 bytes does nothing here")
@pytest.mark.parametrize("integer", [numpy.int64, numpy.uint16, torch.tensor], ids=lambda integer: integer.__name__)
def test_what_is_a_number_of_bytes(integer):
    ring, count = torch_offload.get_ring_bytes(), integer(4096)
    torch_offload.set_ring_bytes(count)
    torch_offload.set_budget(count)
    found = (torch_offload.get_ring_bytes(), torch_offload.get_budget())
    assert found == ((0, 0) if HOST else (4096, 4096))
    options = ("min_bytes", "keep_bytes", "max_gpu_bytes", "max_host_bytes", "in_flight_bytes")
    with torch_offload.saved_tensors(**dict.fromkeys(options, count)):
        assert torch.ones(3, requires_grad=True).exp().sum().item() == pytest.approx(3 * math.e)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_offload.set_ring_bytes(ring)
        torch_offload.set_budget("auto")


@pytest.mark.parametrize("setting", [torch_offload.set_gpu_steps, torch_offload.set_autocast_copies])
@pytest.mark.parametrize("value", [1, 0, "True", None])
def test_what_is_neither_true_nor_false(setting, value):
    with pytest.raises(TypeError, match=f"give True or False, not {value!r}"):
        setting(value)
    assert (torch_offload.get_gpu_steps(), torch_offload.get_autocast_copies()) == (False, False)


@pytest.mark.parametrize(("name", "value"), [("EVICT", "yes"), ("VALIDATE", "1.5"), ("FAULT", "-1"), ("SEED", " ")])
def test_values_that_do_not_parse(name, value):
    done = python(
        """
        import torch, torch_offload
        try:
            torch.ones(3, device="offload")
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        """,
        **{f"TORCH_OFFLOAD_{name}": value, "TORCH_OFFLOAD_LINK": "sim"},
    )
    assert f"TORCH_OFFLOAD_{name}" in done.stdout, done.stderr
    assert "not a whole number" in done.stdout


def test_tensors_are_right_whatever_was_said():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_offload.set_budget(0)
        assert (torch.ones(3, 3, device=OFFLOAD) @ torch.ones(3, 3, device=OFFLOAD)).sum().item() == 27
        torch_offload.set_budget("auto")


@pytest.mark.parametrize(("setting", "found"), [("0", 0), ("4096", 4096)])
def test_a_ring_that_was_set(setting, found):
    told = passes(
        "import torch, torch_offload; torch.ones(3, device='offload'); print(torch_offload.get_ring_bytes())",
        TORCH_OFFLOAD_RING_BYTES=setting,
        TORCH_OFFLOAD_LINK="auto" if GPU else "sim",
    )
    assert int(told) == found
