"""torch.compile with CUDA graphs over weights whose fetches no graph can hold: right, and captured without them."""

import copy
import os

import pytest
import torch
from compiling import fresh_compiler, graphed  # noqa: F401 - a fixture for all tests
from helpers import COMPUTE, GPU, OFFLOAD, assert_same, at, data, layers, passes
from safetensors_files import write
from torch.testing import assert_close

import torch_offload

PINNED = {"TORCH_OFFLOAD_PINNED_LIMIT": str(1 << 30), "TORCH_OFFLOAD_LINK": "auto" if GPU else "sim"}
PAGEABLE = {**PINNED, "TORCH_OFFLOAD_PINNED_LIMIT": "0"}
WIDTH = 32


class Replays:
    """Counts replays of CUDA graphs since it was asked last."""

    def __init__(self):
        self.count, replay = 0, torch.cuda.CUDAGraph.replay
        self.restore = lambda: setattr(torch.cuda.CUDAGraph, "replay", replay)

        def counted(graph):
            self.count += 1
            replay(graph)

        torch.cuda.CUDAGraph.replay = counted

    def since(self):
        found, self.count = self.count, 0
        return found


@pytest.fixture
def replays():
    counting = Replays()
    yield counting
    counting.restore()


def fetches():
    return torch_offload.stats()["fetches"]


def plain_and(kind, folder):
    """A resident model, and one on offload with such memory."""
    torch.manual_seed(0)
    plain = layers(4, WIDTH).requires_grad_(False)
    model = copy.deepcopy(plain).to(OFFLOAD)
    if kind == "file":
        weights = torch_offload.load(write(folder / "x.safetensors", plain.state_dict()), mmap=True)
        model.load_state_dict(weights, assign=True)
    elif kind == "shared":
        model.share_memory()
    elif kind == "unaligned":
        for layer in model[::2]:
            whole = torch.empty(WIDTH * WIDTH + 1, device=OFFLOAD)
            whole[1:] = layer.weight.flatten()
            layer.weight = torch.nn.Parameter(whole[1:].view(WIDTH, WIDTH), requires_grad=False)
    return plain.to(COMPUTE), model


def is_as(kind):
    """What begins elsewhere than a resident weight may be for another kernel."""
    return assert_close if kind == "unaligned" else assert_same


def write_to(*models):
    for model in models:
        for parameter in model.parameters():
            parameter.copy_(parameter.cpu() * 0.9)


@torch.no_grad()
def infers(kind, folder, replays, whole):
    """`whole`: the fetches are in the graph."""
    plain, model = plain_and(kind, folder)
    step, expected = graphed(model), torch.compile(plain, fullgraph=True)
    for k in range(6):
        x, before = data(3, WIDTH, seed=k), fetches()
        is_as(kind)(step(x).clone(), expected(x))
        assert replays.since() > 0 or k < 3
        assert k < 3 or (fetches() == before) == whole
        write_to(plain, model)


def trains(kind, folder, replays):
    """CUDA parameters over frozen weights: the backward fetches these again."""
    plain, model = plain_and(kind, folder)
    found = []
    for frozen in (plain, model):
        torch.compiler.reset()
        scale = torch.ones(WIDTH, device=COMPUTE, requires_grad=True)
        step = graphed(lambda x, frozen=frozen, scale=scale: frozen(x * scale))
        gradients = []
        for k in range(5):
            scale.grad = None
            step(data(3, WIDTH, seed=k)).square().mean().backward()
            assert replays.since() > 1 or k < 3
            gradients.append(scale.grad.clone())
            with torch.no_grad():
                write_to(frozen)
        found.append(gradients)
    is_as(kind)(found[1], found[0])


def refused(kind, folder):
    """PyTorch's own captures say so in a sentence, and the process goes on."""
    plain, model = plain_and(kind, folder)
    x = data(3, WIDTH)
    match = "not page-locked.*" + (r"clone\(\)" if kind == "file" else "TORCH_OFFLOAD_PINNED_LIMIT")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=match), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)
        with pytest.raises(RuntimeError, match=match):
            torch.cuda.make_graphed_callables(copy.copy(model), (x.clone(),))
        assert_same(model(x), plain(x))


def in_a_process(call, **environment):
    here = os.path.dirname(__file__)
    passes(
        f"""
        import sys; sys.path.insert(0, {here!r})
        import pathlib, test_compile_captures as here
        from helpers import deterministic
        replays = here.Replays() if here.GPU else None
        with deterministic():
            here.{call}
        """,
        **environment,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["file", "shared", "unaligned"])
@pytest.mark.skipif("TORCH_OFFLOAD_PINNED_LIMIT" in os.environ, reason="what is shared is page-locked within the limit")
def test_inference(kind, tmp_path, replays):
    infers(kind, tmp_path, replays, whole=kind == "shared")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["file", "shared", "unaligned"])
def test_training_over_frozen_weights(kind, tmp_path, replays):
    trains(kind, tmp_path, replays)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["own", "shared"])
def test_past_the_limit(kind, tmp_path):
    folder = f"pathlib.Path({str(tmp_path)!r})"
    in_a_process(f"infers({kind!r}, {folder}, replays, whole=False)", **PAGEABLE)
    in_a_process(f"trains({kind!r}, {folder}, replays)", **PAGEABLE)
    in_a_process(f"refused({kind!r}, {folder})", **PAGEABLE)


@pytest.mark.gpu
def test_a_file_is_refused_by_captures_of_pytorch(tmp_path):
    refused("file", tmp_path)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", ["file", "shared", "unaligned"])
def test_other_memory_for_the_same_code(kind, tmp_path, replays):
    """What was compiled for weights of one kind is called with another, and with the first again."""
    plain, model = plain_and("own", tmp_path)
    _, other = plain_and(kind, tmp_path)
    ways = [dict(weights.named_parameters()) for weights in (model, other)]
    expected = torch.compile(plain, fullgraph=True)
    for order in (ways, ways[::-1]):
        torch.compiler.reset()
        step, seen = graphed(model), []
        for weights in (*order, *order):
            for name, parameter in weights.items():
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, parameter)
            for k in range(4):
                x = data(3, WIDTH, seed=k)
                is_as(kind)(step(x).clone(), expected(x))
                write_to(plain)
                for values in ways:
                    for name, parameter in values.items():
                        parameter.copy_(plain.get_parameter(name))
            seen.append(replays.since())
        assert min(seen[0], seen[2]) > 0


@pytest.mark.gpu
@torch.no_grad()
def test_constants_of_a_file(tmp_path, replays):
    """With freezing, weights are no inputs of the graph."""
    plain, model = plain_and("file", tmp_path)
    step, expected = graphed(model.eval()), torch.compile(plain, fullgraph=True)
    for k in range(5):
        x = data(3, WIDTH, seed=k)
        with torch._inductor.config.patch(freezing=True):
            found = step(x).clone()
        assert_close(found, expected(x))
        write_to(plain, model)


def tells_what_can_be_captured(folder, own):
    """`own`: what a tensor's own memory says, as all memory of this process does but a file's."""
    from torch_offload import _C

    weight = at(OFFLOAD, 8, 8)
    assert _C.can_be_captured([weight, None, 3, torch.ones(2), torch.empty(0, device=OFFLOAD)]) is own
    assert _C.can_be_captured([at(OFFLOAD, 8, 8).share_memory_()]) is own
    assert _C.can_be_captured([weight[2:]], 16) is own
    assert not _C.can_be_captured([weight.flatten()[1:]], 16)
    path = write(folder / "y.safetensors", {"weight": at("cpu", 8, 8)})
    assert not _C.can_be_captured([weight, torch_offload.load(path, mmap=True)["weight"]])
    assert _C.can_be_captured([torch.empty(0, device=OFFLOAD), torch.ones(2)])


def knows_what_it_compiles(folder, whole):
    """What inductor asks of a forward and its backward, and keeps in the key of its caches."""
    from torch_offload.compile import captures

    were_possible, asked = captures.were_possible, []
    captures.were_possible = lambda: asked.append(were_possible()) or asked[-1]
    try:
        for kind in ("own", "file"):
            torch.compiler.reset()
            _, model = plain_and(kind, folder)
            scale = torch.ones(WIDTH, device=COMPUTE, requires_grad=True)
            step = torch.compile(lambda x, m=model, s=scale: m(x * s), options={"triton.cudagraphs": True})
            step(data(3, WIDTH)).sum().backward()
            assert set(asked) == {whole and kind == "own"}
            asked.clear()
    finally:
        captures.were_possible = were_possible


@pytest.mark.parametrize("environment", [PINNED, PAGEABLE], ids=["within the limit", "past it"])
@pytest.mark.parametrize("what", [tells_what_can_be_captured, knows_what_it_compiles], ids=lambda f: f.__name__)
def test_what_is_known(what, environment, tmp_path):
    call = f"{what.__name__}(pathlib.Path({str(tmp_path)!r}), {environment is PINNED})"
    in_a_process(call, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "caches"), **environment)


@pytest.mark.parametrize("stays", [True, False], ids=["an input that stays", "a copied input"])
def test_what_is_run_without_a_graph(stays):
    """In place of a call of PyTorch's manager of graphs."""
    in_a_process(f"chooses({stays})", **PINNED)


def chooses(stays):
    from types import SimpleNamespace

    from torch._inductor import cudagraph_trees

    from torch_offload.compile import captures

    weight, calls = at(OFFLOAD, 8, 8), []
    manager = cudagraph_trees.CUDAGraphTreeManager
    manager._run = lambda self, inputs: None
    with pytest.raises(ImportError, match=r"inductor has changed.*takes self, inputs"):
        captures.follow()
    manager._run = lambda self, new_inputs, function_id: calls.append("graph")
    captures.follow()
    function = SimpleNamespace(model=lambda inputs: calls.append("plain"), static_input_idxs=[1] if stays else [])
    playing = SimpleNamespace(ids_to_funcs={0: function})
    for _ in range(2):
        manager._run(playing, [3, weight, data(2)], 0)
    assert calls == (["graph"] if stays else ["plain"]) * 2
