"""The text towers that stand beside an image tower, or alone in a file: their names and ours.

The tables are matched against the tensors that an image model does not use (`Bundle.extras`), by the same
code as those of the image towers. `logit_scale` and `logit_bias` make scores of cosines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vitrail.model.config import ViTConfig
from vitrail.weights.families.family import Detection, Family, KeyMap
from vitrail.weights.families.hf import ACTIVATIONS
from vitrail.weights.families.key_rows import Layout, Row, layer, lead, row, same, transposed
from vitrail.weights.families.match import FamilyMatch

OURS = "blocks.{i}."
Settings = Mapping[str, Mapping[str, Any]]
"""The JSON files beside the weights, by name."""


@dataclass(frozen=True)
class TextFamily:
    """One spelling of a text tower."""

    family: Family
    fields: Callable[[FamilyMatch, Settings, ViTConfig | None], dict[str, Any]]
    """Config fields that the shapes do not show, from the settings and from the image tower's config."""
    style: Callable[[FamilyMatch], str]
    """How texts are cleaned, see `open_tokenizer`."""


def _rows(
    embedding: str, positions: tuple[str, Layout], norm: str, blocks: tuple[Row, ...]
) -> tuple[Row, ...]:
    return (
        row(embedding, "tokens.weight"),
        row(positions[0], "position.table", positions[1]),
        *blocks,
        *layer(norm, "norm"),
        row("{w}logit_scale", "logit_scale"),
        row("{w}logit_bias", "logit_bias"),
    )


# ---- OpenAI and OpenCLIP --------------------------------------------------------------------

B = "{w}{p}transformer.resblocks.{i}."
OPENAI_ROWS = _rows(
    "{w}{p}token_embedding.weight",
    ("{w}{p}positional_embedding", same),
    "{w}{p}ln_final",
    (
        *layer(B + "ln_1", OURS + "norm1"),
        row(B + "attn.in_proj_weight", OURS + "attention.qkv.weight"),
        row(B + "attn.in_proj_bias", OURS + "attention.qkv.bias"),
        *layer(B + "attn.out_proj", OURS + "attention.out"),
        *layer(B + "ln_2", OURS + "norm2"),
        *layer(B + "mlp.c_fc", OURS + "mlp.fc1"),
        *layer(B + "mlp.c_proj", OURS + "mlp.fc2"),
        row("{w}{p}text_projection", "head.weight", transposed),
        *layer("{w}{p}text_projection", "head"),  # OpenCLIP's SigLIP: a linear layer
    ),
)


def _openai_fields(match: FamilyMatch, settings: Settings, image: ViTConfig | None) -> dict[str, Any]:
    """OpenAI's tower, or OpenCLIP's of SigLIP, whose projection has a bias."""
    given = settings.get("open_clip_config.json", {}).get("model_cfg", {})
    text = given.get("text_cfg", {}) if isinstance(given, Mapping) else {}
    siglip = _is_siglip(match)
    # OpenAI's two towers have the same activation; timm's image towers tell nothing about the text's.
    shared = image.activation if image is not None and image.norm_pre else "gelu"
    fields: dict[str, Any] = {"activation": shared}
    if "quick_gelu" in given or text:
        fields["activation"] = "quick-gelu" if given.get("quick_gelu") else "gelu"
    if siglip:
        tanh = match.shapes["tokens.weight"][0] > _MULTILINGUAL  # SigLIP 2
        fields |= {"activation": "gelu-tanh" if tanh else "gelu"}
        fields |= {"eps": 1e-6, "causal": False, "pool": "last"}
    if "heads" in text:
        fields["heads"] = text["heads"]
    if "no_causal_mask" in text:
        fields["causal"] = not text["no_causal_mask"]
    return fields


def _is_siglip(match: FamilyMatch) -> bool:
    return "head.bias" in match.shapes


OPENAI = TextFamily(
    Family(
        "clip-text",
        "clip",
        "the text tower of OpenAI's CLIP or OpenCLIP",
        detect=Detection(
            anchors=("{w}{p}token_embedding.weight", B + "attn.in_proj_weight"), prefixes=("text.", "")
        ),
        keys=KeyMap(
            rows=OPENAI_ROWS,
            extras=(
                "{w}{p}attn_mask",
                "{w}attn_mask",
                "{w}input_resolution",
                "{w}context_length",
                "{w}vocab_size",
            ),
        ),
    ),
    _openai_fields,
    lambda match: "openclip" if _is_siglip(match) else "openai",
)

# ---- transformers ---------------------------------------------------------------------------

T, L = "{w}text_model.", "{w}text_model.encoder.layers.{i}."
HF_BLOCKS = (
    *layer(L + "layer_norm1", OURS + "norm1"),
    *layer([f"{L}self_attn.{name}_proj" for name in "qkv"], OURS + "attention.qkv"),
    *layer(L + "self_attn.out_proj", OURS + "attention.out"),
    *layer(L + "layer_norm2", OURS + "norm2"),
    *layer(L + "mlp.fc1", OURS + "mlp.fc1"),
    *layer(L + "mlp.fc2", OURS + "mlp.fc2"),
)
HF_TOWER = (
    T + "embeddings.token_embedding.weight",
    (T + "embeddings.position_embedding.weight", same),
    T + "final_layer_norm",
)
_MULTILINGUAL = 200_000  # ids: Gemma's vocabulary, SigLIP 2


def _hf_settings(settings: Settings) -> Mapping[str, Any]:
    """The settings of the text tower in config.json: its own file, or a part of both towers'."""
    given = settings.get("config.json", {})
    parts = [given.get(name) for name in ("text_config", "text_config_dict")]
    merged = (
        {**(parts[0] or {}), **(parts[1] or {})}
        if all(isinstance(p, (dict, type(None))) for p in parts)
        else {}
    )
    return merged or (given if str(given.get("model_type", "")).endswith("text_model") else {})


def _hf_shared(text: Mapping[str, Any]) -> dict[str, Any]:
    names = {"num_attention_heads": "heads", "layer_norm_eps": "eps"}
    fields = {ours: text[theirs] for theirs, ours in names.items() if theirs in text}
    if text.get("hidden_act") in ACTIVATIONS:
        fields["activation"] = ACTIVATIONS[text["hidden_act"]]
    return fields


def _clip_fields(match: FamilyMatch, settings: Settings, image: ViTConfig | None) -> dict[str, Any]:
    text = _hf_settings(settings)
    # A config with 2 is from before transformers knew the end token: then, the largest id is it.
    end = text.get("eos_token_id", 49_407)
    activation = "quick-gelu" if text or image is None else image.activation
    return {"activation": activation, "end": None if end == 2 else end, **_hf_shared(text)}


def _siglip_fields(match: FamilyMatch, settings: Settings, image: ViTConfig | None) -> dict[str, Any]:
    fixed = {"eps": 1e-6, "activation": "gelu-tanh", "causal": False, "pool": "last"}
    return {**fixed, **_hf_shared(_hf_settings(settings))}


HF_SIGLIP = TextFamily(
    Family(
        "hf-siglip-text",
        "hf",
        "the text tower of transformers' SigLIP or SigLIP 2",
        detect=Detection(anchors=(T + "embeddings.token_embedding.weight", T + "head.weight")),
        keys=KeyMap(
            rows=(*_rows(*HF_TOWER, HF_BLOCKS), *layer(T + "head", "head")),
            extras=(T + "embeddings.position_ids",),
        ),
    ),
    _siglip_fields,
    lambda match: "lower" if match.shapes["tokens.weight"][0] > _MULTILINGUAL else "letters",
)
HF_CLIP = TextFamily(
    Family(
        "hf-clip-text",
        "hf",
        "the text tower of transformers' CLIP",
        detect=Detection(anchors=(T + "embeddings.token_embedding.weight", T + "final_layer_norm.weight")),
        keys=KeyMap(
            rows=(*_rows(*HF_TOWER, HF_BLOCKS), row("{w}text_projection.weight", "head.weight")),
            extras=(T + "embeddings.position_ids",),
        ),
    ),
    _clip_fields,
    lambda match: "transformers",
)

# ---- MobileCLIP -----------------------------------------------------------------------------

M = "{w}{p}transformer.{i}."
MOBILE = TextFamily(
    Family(
        "mobileclip-text",
        "mobileclip",
        "the text tower of MobileCLIP-B, as Apple published it",
        detect=Detection(
            anchors=("{w}{p}embedding_layer.weight", M + "pre_norm_mha.1.qkv_proj.weight"),
            prefixes=("text_encoder.", ""),
        ),
        keys=KeyMap(
            rows=_rows(
                "{w}{p}embedding_layer.weight",
                ("{w}{p}positional_embedding.pos_embed.pos_embed", lead(2)),
                "{w}{p}final_layer_norm",
                (
                    *layer(M + "pre_norm_mha.0", OURS + "norm1"),
                    *layer(M + "pre_norm_mha.1.qkv_proj", OURS + "attention.qkv"),
                    *layer(M + "pre_norm_mha.1.out_proj", OURS + "attention.out"),
                    *layer(M + "pre_norm_ffn.0", OURS + "norm2"),
                    *layer(M + "pre_norm_ffn.1", OURS + "mlp.fc1"),
                    *layer(M + "pre_norm_ffn.4", OURS + "mlp.fc2"),
                    row("{w}{p}projection_layer", "head.weight", transposed),
                ),
            ),
        ),
    ),
    lambda match, settings, image: {},
    lambda match: "openai",
)

TEXT_FAMILIES = (OPENAI, HF_SIGLIP, HF_CLIP, MOBILE)
