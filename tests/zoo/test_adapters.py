"""LoRA of peft over a base on offload."""

import pytest
import torch
from helpers import CACHED, COMPUTE, OFFLOAD, assert_same, same, values
from random_models import gpt2, language, llama, texts
from training import adamw, check_training, state, train

import torch_offload

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
LAYERS = ["q_proj", "v_proj", "down_proj"]


def adapted(make=llama, layers=LAYERS, **options):
    return peft.get_peft_model(make(), peft.LoraConfig(r=4, target_modules=layers, lora_dropout=0.1, **options))


@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"use_rslora": True, "bias": "lora_only"}, {"modules_to_save": ["lm_head"]}],
    ids=lambda options: next(iter(options), "default"),
)
def test_training(options, feed):
    model = check_training(lambda: adapted(**options), texts, language, feed)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_gpt2():
    """Its layers are transposed."""
    check_training(lambda: adapted(gpt2, ["c_attn"], fan_in_fan_out=True), texts, language)


def test_over_a_base_that_is_on_offload_already():
    def run(device):
        model = adapted(lambda: llama().to(device))
        assert {p.device.type for p in model.parameters()} == {device.type}
        return train(model, texts, language, COMPUTE)

    same(run)


def test_adapters_on_the_compute_device():
    def run(device):
        model = adapted().to(device)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(COMPUTE)
        optimizer = adamw(model)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = language(model, texts()[0].to(COMPUTE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, state(model)

    same(run)


def test_checkpointed():
    def make():
        model = adapted()
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        return model

    check_training(make, texts, language)


@pytest.mark.skipif(not CACHED, reason="nothing crosses a link")
def test_the_frozen_base_does_not_come_home():
    model = adapted().to(OFFLOAD)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert trained < frozen / 4
    before = torch_offload.memory_stats()["link.bytes_to_host"]
    language(model, texts()[0].to(COMPUTE)).backward()
    torch_offload.synchronize()
    assert torch_offload.memory_stats()["link.bytes_to_host"] - before <= 2 * trained


def test_switched_disabled_merged_and_unloaded():
    def run(device):
        torch.manual_seed(3)
        model = adapted(init_lora_weights=False).to(device).eval()
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        assert {p.device.type for p in model.parameters()} == {device.type}
        tokens = texts()[0].to(COMPUTE)
        found = [model(input_ids=tokens).logits]
        model.set_adapter("other")
        found.append(model(input_ids=tokens).logits)
        with model.disable_adapter():
            found.append(model(input_ids=tokens).logits)
        model.set_adapter("default")
        model.merge_adapter()
        found.append(model(input_ids=tokens).logits)
        model.unmerge_adapter()
        found.append(model(input_ids=tokens).logits)
        merged = model.merge_and_unload()
        found.append(merged(input_ids=tokens).logits)
        assert {p.device.type for p in merged.parameters()} == {device.type}
        return [logits.detach() for logits in found]

    same(run)


def test_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model = adapted(init_lora_weights=False).to(OFFLOAD)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(llama().to(OFFLOAD), tmp_path)
    assert {p.device.type for p in loaded.parameters()} == {"offload"}
    assert_same(values(loaded), values(model))


def test_generation():
    def run(device):
        model = adapted(init_lora_weights=False).to(device).eval()
        return model.generate(input_ids=texts()[0].to(model.device), max_new_tokens=8, do_sample=False, pad_token_id=0)

    same(run)
