"""Every entry of PyTorch's op database, with operands mixed between offload and the plain device, and all on offload.

A few samples of each entry; `make opinfo` takes all. entry.py says what is compared, known_differences.toml what may differ.
"""

import known
from pool import link

KNOWN = known.load()


def test_operator(entry_name, look, record_property, pytestconfig):
    answer = look(entry_name)
    record_property("opinfo", (entry_name, answer))
    wrong = known.judge(entry_name, answer, KNOWN, pytestconfig.getoption("--whole"))
    assert not wrong, "\n".join([f"{entry_name}, link {link()}:", *wrong])


def test_known_differences_are_of_entries(pytestconfig):
    assert {k.entry for k in KNOWN} <= set(pytestconfig.opinfo_pool.names())
