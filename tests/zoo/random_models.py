"""Small models of transformers from random configurations, what they are fed with, and their losses."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

WORDS = 64
ATTENTION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None, **options
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**ATTENTION, **options}))


def qwen2(**options):
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**ATTENTION, **options}))


def qwen3(**options):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**ATTENTION, "head_dim": 8, **options}))


def mixtral(**options):
    config = {**ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2, **options}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))


def gpt_oss(**options):
    """Its attention has a learnt sink, which every head's every row gets as a further column."""
    config = {**ATTENTION, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **options}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**config, experts_implementation="eager"))


def mamba(**options):
    config = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": WORDS, "eos_token_id": None}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**{**config, **options}))


def t5(**options):
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, **options
    )
    return transformers.T5ForConditionalGeneration(config)


def bert(**options):
    config = {k: v for k, v in ATTENTION.items() if k != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**config, **options))


def vit(**options):
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=5,
        **options,
    )
    return transformers.ViTForImageClassification(config)


def clip(**options):
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**tower, "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": WORDS - 1}
    vision = {**tower, "image_size": 16, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, **options)
    return transformers.CLIPModel(config)


def whisper(**options):
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **options,
    )
    return transformers.WhisperForConditionalGeneration(config)


def texts():
    return [torch.randint(2, WORDS, (2, 10))]


def padded_texts():
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :4] = 0
    return [torch.randint(2, WORDS, (2, 10)), mask]


def pairs_of_texts():
    return [torch.randint(2, WORDS, (2, 10)), torch.randint(2, WORDS, (2, 6))]


def images():
    return [torch.randn(3, 3, 16, 16), torch.randint(0, 5, (3,))]


def captioned_images():
    return [torch.randn(3, 3, 16, 16), torch.randint(2, WORDS - 1, (3, 8))]


def recordings():
    return [torch.randn(2, 8, 40), torch.randint(3, WORDS, (2, 6))]


def language(model, tokens, mask=None):
    return model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


def translation(model, tokens, labels):
    return model(input_ids=tokens, labels=labels).loss


def classification(model, pixels, labels):
    return model(pixel_values=pixels, labels=labels).loss


def contrast(model, pixels, tokens):
    return model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss


def transcription(model, recordings, labels):
    return model(input_features=recordings, labels=labels).loss
