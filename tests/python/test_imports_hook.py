"""Modules of others that are changed when a program imports them."""

from helpers import passes


def test_who_asks_for_a_module_does_not_end_the_wait_for_it():
    program = """
        import importlib.util, sys, torch, torch_offload
        name = "torch.nn.attention.flex_attention"
        for _ in range(2):
            assert importlib.util.find_spec(name) is not None and name not in sys.modules
        from torch.nn.attention.flex_attention import flex_attention
        q = torch.randn(1, 1, 16, 16)
        print(torch.equal(flex_attention(q.to("offload"), q, q), flex_attention(q, q, q)))
    """
    assert passes(program, PYTHONWARNINGS="ignore").split()[-1] == "True"
