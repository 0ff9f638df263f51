"""Greedy generation: the tokens and the scores are the plain device's."""

import pytest
import torch
from helpers import COMPUTE, GPU, same
from random_models import gpt2, llama, mamba, mixtral, padded_texts, pairs_of_texts, qwen3, t5

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH = 12


def generating(make, feed, prompt=padded_texts, **options):
    def run(device):
        model = make().eval().to(device)
        tokens, mask = prompt()
        place = model.device if feed == "offload" else COMPUTE
        inputs = {"input_ids": tokens.to(place)}
        if mask.shape == tokens.shape:
            inputs["attention_mask"] = mask.to(place)
        found = model.generate(
            **inputs,
            **{"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0, **options},
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert found.sequences.device.type == place.type
        return found.sequences, found.scores

    return run


MODELS = {
    "GPT-2": gpt2,
    "Llama": llama,
    "Llama eager": lambda: llama(attn_implementation="eager"),
    "Qwen3": qwen3,
    # Its default takes one implementation to decode with on the CPU and another one on other devices.
    "Mixtral": lambda: mixtral(experts_implementation="batched_mm" if GPU else "eager"),
    "Mamba": mamba,
}


@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("name", MODELS)
def test_with_a_cache(name, feed):
    sequences, scores = same(generating(MODELS[name], feed))
    assert sequences.shape == (2, 10 + LENGTH)
    assert len(scores) == LENGTH


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_encoder_and_decoder(feed):
    sequences, _ = same(generating(t5, feed, pairs_of_texts, min_new_tokens=LENGTH))
    assert sequences.shape == (2, 1 + LENGTH)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
        {"num_beams": 3},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_ways(options, feed):
    same(generating(llama, feed, **options))


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_one_sequence_ends_before_the_other(feed):
    torch.manual_seed(0)
    sequences, _ = generating(llama, "plain")(COMPUTE)
    new = sequences[:, 10:].tolist()
    end = next(token for token in new[0] if token not in new[1])
    sequences, _ = same(generating(llama, feed, eos_token_id=end))
    assert 0 in sequences[0, 10:]
    assert sequences.shape[1] == 10 + LENGTH


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_sampling(feed):
    """Tokens are drawn where the scores are: with inputs on offload too that is the compute device."""
    same(generating(llama, feed, do_sample=True, top_k=8, top_p=0.9, temperature=0.7))
