"""Tiny text towers and tokenizers, written by the libraries' own code."""

import json

import torch
import transformers as hf

from vitrail.weights.text.tokenizer import END_OF_WORD, byte_symbols

WORDS = ["photo", "of", "cat", "dog", "small", "large", "left", "right"]


def tiny_vocabulary(words=WORDS):
    """Vocabulary and merges with a token for each of these words, start and end last."""
    symbols = byte_symbols()
    symbols = [*symbols, *(symbol + END_OF_WORD for symbol in symbols)]
    merges = []
    for word in words:
        parts = [*word[:-1], word[-1] + END_OF_WORD]
        while len(parts) > 1:
            pair = parts[0], parts[1]
            if pair not in merges:
                merges.append(pair)
                symbols.append("".join(pair))
            parts = ["".join(pair), *parts[2:]]
    names = dict.fromkeys([*symbols, "<|startoftext|>", "<|endoftext|>"])
    return {name: number for number, name in enumerate(names)}, merges


def save_clip_tokenizer(folder, words=WORDS):
    """vocab.json and merges.txt, as transformers' CLIP had them first."""
    vocabulary, merges = tiny_vocabulary(words)
    (folder / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return vocabulary, merges


def hf_clip_tokenizer(words=WORDS):
    """transformers' own tokenizer with this vocabulary."""
    vocabulary, merges = tiny_vocabulary(words)
    return hf.CLIPTokenizer(vocab=vocabulary, merges=merges)


def gemma_like():
    """transformers' tokenizer of SigLIP 2, with a small vocabulary."""
    letters = [chr(code) for code in range(97, 123)]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *bytes_, "▁", *letters]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [("o", "f"), ("c", "a"), ("ca", "t"), ("▁", "cat")]
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    return hf.Siglip2Tokenizer(vocab=vocabulary, merges=merges, padding_side="right")


def noisy(model, scale=0.2):
    """Random parameters, so that no part of a tower can be wrong unnoticed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def open_clip_model(kind):
    """OpenCLIP's model: "gelu" or "quick-gelu", "custom" with `text.` before the names, or "siglip"."""
    import open_clip

    plain = open_clip.CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32)
    text = dict(context_length=16, vocab_size=49_408, width=64, heads=1, layers=2)
    if kind == "siglip":
        text |= dict(
            vocab_size=400, no_causal_mask=True, proj_bias=True, pool_type="last", norm_kwargs={"eps": 1e-6}
        )
        vision = open_clip.CLIPVisionCfg(
            timm_model_name="vit_tiny_patch16_224", timm_pool="token", timm_proj="linear"
        )
        return open_clip.CustomTextCLIP(20, vision, open_clip.CLIPTextCfg(**text), init_logit_bias=-3.0)
    build = open_clip.CustomTextCLIP if kind == "custom" else open_clip.CLIP
    return build(20, plain, open_clip.CLIPTextCfg(**text), quick_gelu=kind == "quick-gelu")


def apple_names(theirs):
    """OpenCLIP's text tower under Apple's names: the reverse of OpenCLIP's own conversion of MobileCLIP."""
    names = {
        "token_embedding": "embedding_layer", "ln_final": "final_layer_norm", "text_projection": "projection_layer",
        "transformer.resblocks.": "transformer.", "ln_1": "pre_norm_mha.0", "attn.in_proj_": "pre_norm_mha.1.qkv_proj.",
        "attn.out_proj": "pre_norm_mha.1.out_proj", "ln_2": "pre_norm_ffn.0", "mlp.c_fc": "pre_norm_ffn.1",
        "mlp.c_proj": "pre_norm_ffn.4",
    }  # fmt: skip
    state = {"logit_scale": theirs.logit_scale.detach(), "image_encoder.model.stem": torch.ones(3)}
    for name, tensor in theirs.text.state_dict().items():
        if name == "positional_embedding":
            name, tensor = "positional_embedding.pos_embed.pos_embed", tensor[None, None]
        for old, new in names.items():
            name = name.replace(old, new)
        state[f"text_encoder.{name}"] = tensor.contiguous()
    return state
