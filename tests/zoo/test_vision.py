"""Networks for images: timm's, torchvision's, and a UNet of diffusers, from random weights."""

import pytest
import torch
import torch.nn.functional as F
from helpers import COMPUTE, GPU, at, grads, same
from training import check_training

pytestmark = pytest.mark.filterwarnings("ignore")


def timm(name, **options):
    return lambda: pytest.importorskip("timm").create_model(name, pretrained=False, num_classes=5, **options)


def torchvision(name):
    return lambda: pytest.importorskip("torchvision").models.get_model(name, weights=None, num_classes=5)


MODELS = {
    "timm ResNet": timm("resnet18", channels=(8, 8, 16, 16)),
    "timm ResNet bottleneck": timm("resnet26d", channels=(8, 8, 8, 8)),
    "timm ConvNeXt": timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), drop_path_rate=0.2),
    "timm ViT": timm(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, drop_rate=0.1
    ),
    "timm EfficientNet": timm("test_efficientnet"),
    "timm Swin": timm("swin_tiny_patch4_window7_224", img_size=56, embed_dim=16, depths=(2, 2), num_heads=(2, 4)),
    "torchvision SqueezeNet": torchvision("squeezenet1_1"),
    "torchvision ShuffleNet": torchvision("shufflenet_v2_x0_5"),
}


def images(size):
    return lambda: [torch.randn(2, 3, size, size), torch.randint(0, 5, (2,))]


def classification(model, pixels, labels):
    return F.cross_entropy(model(pixels), labels)


@pytest.mark.parametrize("feed", ["plain", "offload"])
@pytest.mark.parametrize("name", MODELS)
def test_training(name, feed):
    def make():
        model = MODELS[name]()
        for part in model.modules():
            # It draws in place, in a new tensor: for activations on offload that is the host's generator, and on CUDA CUDA's.
            if type(part).__name__ == "DropPath" and GPU and feed == "offload":
                part.drop_prob = 0.0
        return model

    check_training(make, images(56 if "Swin" in name else 32), classification, feed)


ASKS_FOR_CUDA = pytest.mark.xfail(
    GPU,
    reason="roi_align has another algorithm, in Python, for what is_cuda where deterministic ones are wanted",
    strict=True,
)


@pytest.mark.parametrize("feed", ["plain", pytest.param("offload", marks=ASKS_FOR_CUDA)])
def test_operations_of_torchvision(feed):
    """They have kernels for the CPU and for CUDA only."""
    ops = pytest.importorskip("torchvision").ops

    def run(device):
        place = device if feed == "offload" else COMPUTE
        corners = at(place, 20, 2).abs() * 4
        boxes = torch.cat([corners, corners + at(place, 20, 2, seed=1).abs() * 8 + 1], 1)
        kept = ops.nms(boxes, at(place, 20, seed=2), 0.3)
        conv = ops.DeformConv2d(3, 4, 3, padding=1).to(device)
        maps = conv(at(place, 2, 3, 16, 16), at(place, 2, 18, 16, 16, seed=3))
        parts = ops.roi_align(maps, [boxes[kept][:5], boxes[:3]], (4, 4))
        (parts * at(place, *parts.shape, seed=4)).sum().backward()
        assert {t.device.type for t in (kept, maps, parts)} == {place.type}
        return kept, maps, parts, grads(conv)

    same(run)


def unet(**options):
    config = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, **options}
    return pytest.importorskip("diffusers").UNet2DModel(
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), **config
    )


def conditional_unet(**options):
    return pytest.importorskip("diffusers").UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=12,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        **options,
    )


def noisy():
    return [torch.randn(2, 3, 8, 8), torch.randint(0, 1000, (2,)), torch.randn(2, 3, 8, 8)]


def noisy_with_text():
    return [torch.randn(2, 4, 8, 8), torch.randint(0, 1000, (2,)), torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)]


def denoising(model, sample, time, noise, *text):
    return F.mse_loss(model(sample, time, *text).sample, noise)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_unet(feed):
    check_training(unet, noisy, denoising, feed)


@pytest.mark.parametrize("feed", ["plain", "offload"])
def test_conditional_unet(feed):
    check_training(conditional_unet, noisy_with_text, denoising, feed)


def test_conditional_unet_with_checkpointing():
    def make():
        model = conditional_unet()
        model.enable_gradient_checkpointing()
        return model

    check_training(make, noisy_with_text, denoising)
