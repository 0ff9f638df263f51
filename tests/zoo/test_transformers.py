"""Models of transformers, from random configurations: three steps of AdamW."""

import pytest
from helpers import GPU
from random_models import (
    bert,
    captioned_images,
    classification,
    clip,
    contrast,
    gpt2,
    gpt_oss,
    images,
    language,
    llama,
    mamba,
    mixtral,
    padded_texts,
    pairs_of_texts,
    qwen2,
    qwen3,
    recordings,
    t5,
    texts,
    transcription,
    translation,
    vit,
    whisper,
)
from training import check_training

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
    "GPT-OSS": (gpt_oss, padded_texts, language),
    "Mamba": (mamba, texts, language),
    "T5": (t5, pairs_of_texts, translation),
    "BERT": (bert, padded_texts, language),
    "ViT": (vit, images, classification),
    "CLIP": (clip, captioned_images, contrast),
    "Whisper": (whisper, recordings, transcription),
}


# It counts with torch.histc: of integers on any device that isn't called "cpu", for which the CPU has no kernel.
COUNTS = pytest.mark.xfail(not GPU, raises=NotImplementedError, strict=True, reason="histc of integers needs a GPU")


@pytest.mark.parametrize(
    ("name", "feed"),
    [
        pytest.param(
            name, feed, marks=[COUNTS] if feed == "offload" and name in ("Mixtral", "Mixtral balanced") else []
        )
        for name in MODELS
        for feed in ("plain", "offload")
    ],
)
def test_training(name, feed):
    make, inputs, loss = MODELS[name]
    check_training(make, inputs, loss, feed)
