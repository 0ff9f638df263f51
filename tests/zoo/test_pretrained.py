"""What users do to a model of transformers between making and training it."""

import pytest
import torch
from helpers import COMPUTE, CPU, GPU, OFFLOAD, assert_same, same, values
from random_models import WORDS, gpt2, language, llama, mixtral, t5, texts, transformers
from training import check_training, train

pytestmark = pytest.mark.filterwarnings("ignore")


def everywhere(model):
    return {value.device.type for value in values(model).values()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_gradient_checkpointing(make, reentrant):
    def checkpointed():
        model = make()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        assert model.is_gradient_checkpointing
        return model

    check_training(checkpointed, texts, language)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_low_precision(dtype, feed):
    check_training(lambda: llama().to(dtype), texts, language, feed)


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double()])
def test_converted_on_the_device(convert):
    def run(device):
        model = convert(llama().to(device))
        assert everywhere(model) == {device.type}
        return train(model, texts, language, COMPUTE)

    same(run)


def test_tied_weights_are_one():
    model = check_training(lambda: gpt2(tie_word_embeddings=True), texts, language)
    assert model.lm_head.weight is model.transformer.wte.weight
    model.tie_weights()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.num_parameters() == gpt2().num_parameters()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [WORDS + 7, WORDS - 7])
def test_resized_embeddings(size, tied):
    """New rows are drawn with the mean and the covariance of the old ones, each device from its own generator."""
    resized = []

    def run(device):
        model = llama(tie_word_embeddings=tied).to(device)
        torch.manual_seed(1)
        model.resize_token_embeddings(size)
        assert everywhere(model) == {device.type}
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        resized.append({name: value.cpu().clone() for name, value in model.state_dict().items()})
        model.load_state_dict(resized[0])
        torch.manual_seed(2)
        return train(model, lambda: [texts()[0] % size], language, COMPUTE)

    same(run)
    if GPU:
        torch.testing.assert_close(resized[1], resized[0], rtol=0, atol=1e-3)
    else:
        assert_same(resized[1], resized[0])


@pytest.mark.parametrize("make", [gpt2, llama, lambda: llama(tie_word_embeddings=True), mixtral, t5])
def test_saved_and_loaded(make, tmp_path):
    torch.manual_seed(0)
    model = make().to(OFFLOAD)
    model.save_pretrained(tmp_path)
    kind = type(model)

    plain = kind.from_pretrained(tmp_path)
    assert everywhere(plain) == {"cpu"}
    assert_same(values(plain), values(model))

    moved = kind.from_pretrained(tmp_path).to(OFFLOAD)
    assert_same(values(moved), values(model))

    mapped = kind.from_pretrained(tmp_path, device_map="offload")
    assert everywhere(mapped) == {"offload"}
    assert_same(values(mapped), values(model))

    with torch.device("offload"):
        under = kind.from_pretrained(tmp_path)
    assert everywhere(under) == {"offload"}
    assert_same(values(under), values(model))


def test_saved_in_several_files(tmp_path):
    torch.manual_seed(0)
    model = llama().to(OFFLOAD)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = type(model).from_pretrained(tmp_path, device_map="offload", dtype=torch.bfloat16)
    assert_same(values(loaded), values(type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)))


def test_loaded_models_train(tmp_path):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path)

    def run(device):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map=device)
        return train(model, texts, language, COMPUTE)

    same(run)


def test_made_under_a_default_device():
    """The weights are the host's random numbers."""

    def run(device):
        with torch.device(device if device == OFFLOAD else CPU):
            model = llama()
        assert device == COMPUTE or everywhere(model) == {"offload"}
        return train(model.to(device), texts, language, device)

    same(run)
