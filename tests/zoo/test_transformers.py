"""Models of transformers, from random configurations: three steps of AdamW."""

import pytest
from helpers import GPU
from training import check_training

pytest.importorskip("transformers")

from random_models import (
    bert,
    classification,
    gpt2,
    images,
    language,
    llama,
    mamba,
    mixtral,
    padded_texts,
    pairs_of_texts,
    qwen2,
    qwen3,
    t5,
    texts,
    translation,
    vit,
)

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = {
    "GPT-2": (gpt2, texts, language),
    "GPT-2 eager": (lambda: gpt2(attn_implementation="eager"), padded_texts, language),
    "Llama": (llama, texts, language),
    "Llama padded": (llama, padded_texts, language),
    "Llama eager": (lambda: llama(attn_implementation="eager"), padded_texts, language),
    "Llama tied": (lambda: llama(tie_word_embeddings=True), texts, language),
    "Qwen2": (qwen2, texts, language),
    "Qwen3": (qwen3, texts, language),
    "Mixtral": (mixtral, texts, language),
    "Mixtral eager": (lambda: mixtral(experts_implementation="eager"), texts, language),
    "Mixtral batched": (lambda: mixtral(experts_implementation="batched_mm"), texts, language),
    "Mixtral balanced": (lambda: mixtral(output_router_logits=True), texts, language),
    "Mamba": (mamba, texts, language),
    "T5": (t5, pairs_of_texts, translation),
    "BERT": (bert, padded_texts, language),
    "ViT": (vit, images, classification),
}


# It counts with torch.histc: of integers on any device that isn't called "cpu", for which the CPU has no kernel.
COUNTS = pytest.mark.xfail(not GPU, raises=NotImplementedError, strict=True, reason="histc of integers needs a GPU")


@pytest.mark.parametrize(
    ("name", "feed"),
    [
        pytest.param(name, feed, marks=[COUNTS] if feed == "offload" and name in ("Mixtral", "Mixtral balanced") else [])
        for name in MODELS
        for feed in ("plain", "offload")
    ],
)
def test_training(name, feed):
    make, inputs, loss = MODELS[name]
    check_training(make, inputs, loss, feed)
