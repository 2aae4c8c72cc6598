"""Options of ours and the same options of timm and transformers: equal logits from the same weights."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import vitrail as vt
from tests.support.models import add_noise
from tests.support.peer_keys import TIMM, load_peer_weights

OURS = dict(width=48, depth=2, heads=4, mlp_width=96, patch=8, size=32, classes=7)
THEIRS = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, mlp_ratio=2, num_classes=7)
EXTRA = {
    "norm_pre": "norm_pre",
    "blocks.{i}.scale1": "blocks.{i}.ls1",
    "blocks.{i}.scale2": "blocks.{i}.ls2",
    "blocks.{i}.attention.q_norm": "blocks.{i}.attn.q_norm",
    "blocks.{i}.attention.k_norm": "blocks.{i}.attn.k_norm",
    "pool.norm": "attn_pool.norm",
    "pool.mlp.fc1": "attn_pool.mlp.fc1",
    "pool.mlp.fc2": "attn_pool.mlp.fc2",
    "pool.attention.out": "attn_pool.proj",
}
CASES = {
    "layer scale": (dict(layer_scale=0.1), dict(init_values=0.1)),
    "qk norm": (dict(qk_norm=True), dict(qk_norm=True)),
    "no qkv bias": (dict(qkv_bias="none"), dict(qkv_bias=False)),
    "norm_pre": (dict(norm_pre=True, embedding_bias=False), dict(pre_norm=True)),
    "mean of patches, norm after": (dict(pool="mean", pool_norm="after"), dict(global_pool="avg")),
    "mean of patches, norm before": (dict(pool="mean"), dict(global_pool="avg", fc_norm=False)),
    "no class token": (
        dict(class_token=False, pool="mean"),
        dict(class_token=False, global_pool="avg", fc_norm=False),
    ),
    "rows for patches": (dict(rows="patches"), dict(no_embed_class=True)),
    "registers": (dict(registers=3), dict(reg_tokens=3)),
    "registers, rows for patches": (
        dict(registers=3, rows="patches"),
        dict(reg_tokens=3, no_embed_class=True),
    ),
    "attention pool": (dict(pool="attention", class_token=False), dict(global_pool="map", class_token=False)),
    "gelu tanh": (dict(activation="gelu-tanh"), dict(act_layer="gelu_tanh")),
    "quick gelu": (dict(activation="quick-gelu"), dict(act_layer="quick_gelu")),
    "rms norm": (dict(norm="rms"), dict(norm_layer="rmsnorm")),
    "oblong": (dict(size=(16, 40)), dict(img_size=(16, 40))),
}


def timm_state(model):
    """timm's state dict with the prefix tokens in one tensor, and the attention pool's q and kv as one qkv."""
    state = {name.replace(".gamma", ".weight"): tensor for name, tensor in model.state_dict().items()}
    tokens = [state.pop(name) for name in ("cls_token", "reg_token") if name in state]
    if tokens:
        state["cls_token"] = torch.cat([token[0] for token in tokens])
    if "attn_pool.latent" in state:
        for kind in ("weight", "bias"):
            q, kv = state.pop(f"attn_pool.q.{kind}"), state.pop(f"attn_pool.kv.{kind}")
            state[f"attn_pool.qkv.{kind}"] = torch.cat([q, kv])
    if "fc_norm.weight" in state:
        state |= {
            f"norm.{kind}": state.pop(f"fc_norm.{kind}")
            for kind in ("weight", "bias")
            if f"fc_norm.{kind}" in state
        }
    return state


@pytest.mark.parametrize(("ours", "theirs"), CASES.values(), ids=CASES.keys())
def test_logits_agree_with_timm(ours, theirs):
    reference = add_noise(VisionTransformer(**{**THEIRS, **theirs}))
    config = vt.ViTConfig(**{**OURS, **ours}, eps=1e-6)
    table = {**TIMM, **EXTRA, "pool.probe": "attn_pool.latent", "pool.attention.qkv": "attn_pool.qkv"}
    model = load_peer_weights(table, timm_state(reference), vt.ViT(config))
    images = torch.randn(3, 3, *config.pixels)
    with torch.no_grad():
        expected, logits = reference(images), model(images)
    assert expected.abs().max() > 0.1
    assert (logits - expected).abs().max() < 1e-5 * max(1, expected.abs().max())


def test_rotary_positions_of_dinov3():
    """The same rotation of q and k as in transformers' DINOv3, for the same grid."""
    from transformers import DINOv3ViTConfig
    from transformers.models.dinov3_vit import modeling_dinov3_vit as theirs

    settings = DINOv3ViTConfig(hidden_size=32, num_attention_heads=2, image_size=(32, 48), patch_size=8)
    cos, sin = theirs.DINOv3ViTRopePositionEmbedding(settings).eval()(torch.zeros(1, 3, 32, 48))
    config = vt.ViTConfig(
        width=32, depth=1, heads=2, patch=8, size=(32, 48), position="rotary-dinov3", registers=4
    )
    position = vt.ViT(config).position
    heads = torch.randn(1, 2, 29, 16)
    expected, _ = theirs.apply_rotary_pos_emb(heads, heads, cos, sin)
    assert (position.rotation(config.grid)(heads) - expected).abs().max() < 1e-5


def test_gated_mlp_is_the_swiglu_of_dinov2():
    from transformers import Dinov2Config
    from transformers.models.dinov2.modeling_dinov2 import Dinov2SwiGLUFFN

    theirs = add_noise(Dinov2SwiGLUFFN(Dinov2Config(hidden_size=48, mlp_ratio=4)))
    hidden = theirs.down_proj.in_features
    config = vt.ViTConfig(**{**OURS, "mlp_width": hidden}, mlp="gated", activation="silu")
    ours = vt.ViT(config).blocks[0].mlp
    gate, up = theirs.gate_proj.state_dict(), theirs.up_proj.state_dict()
    ours.fc1.load_state_dict({kind: torch.cat([gate[kind], up[kind]]) for kind in gate})
    ours.fc2.load_state_dict(theirs.down_proj.state_dict())
    z = torch.randn(2, 5, 48)
    assert (ours(z) - theirs(z)).abs().max() < 1e-5
