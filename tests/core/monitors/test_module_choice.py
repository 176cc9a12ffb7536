"""Blocks and ends are found in every architecture, and patterns find what they name."""

import pytest
import torch
from torch import nn

from hf_nanguard import ArgumentError
from hf_nanguard.core.monitors.module_choice import find_blocks, find_outer_layers, pick_modules
from tests.architectures import BY_NAME
from tests.models import tiny_llama

BLOCKS = {
    "llama": ["model.layers.0", "model.layers.1"],
    "mixtral": ["model.layers.0", "model.layers.1"],
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "vit": ["vit.layers.0", "vit.layers.1"],
    "whisper": ["model.encoder.layers.0", "model.decoder.layers.0"],
    "llava": [
        "model.vision_tower.encoder.layers.0", "model.vision_tower.encoder.layers.1",
        "model.language_model.layers.0", "model.language_model.layers.1",
    ],
}  # fmt: skip
ENDS = {
    "llama": {"model.embed_tokens", "lm_head"},
    "gpt2": {"transformer.wte", "transformer.wpe", "lm_head"},
    "vit": {"vit.embeddings.patch_embeddings.projection", "classifier"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_the_elements_of_the_outermost_lists(name):
    assert list(find_blocks(BY_NAME[name].build())) == BLOCKS[name]


@pytest.mark.parametrize("name", ENDS)
def test_ends_are_the_layers_outside_of_blocks(name):
    assert find_outer_layers(BY_NAME[name].build()).keys() == ENDS[name]


def test_a_clip_has_two_towers():
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 64, "max_position_embeddings": 16}
    config = CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 16, "patch_size": 8}, projection_dim=8)
    blocks = find_blocks(CLIPModel(config))
    assert list(blocks) == ["text_model.encoder.layers.0", "vision_model.encoder.layers.0"]


def test_lists_in_lists_and_weights_that_are_computed():
    model = nn.ModuleDict({"towers": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.GELU()])])})
    model["head"] = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert list(find_blocks(model)) == ["towers.0.0", "towers.1.0"]
    assert list(find_outer_layers(model)) == ["head"]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["model.layers.*.mlp"], ["model.layers.0.mlp", "model.layers.1.mlp"]),
        (["lm_head", "layers.1"], ["model.layers.1", "lm_head"]),
        (["*.down_proj"], ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]),
    ],
)
@pytest.mark.parametrize("lora", [False, True])
def test_patterns_may_leave_out_leading_parts(patterns, found, lora):
    model = tiny_llama()
    prefix = ""
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        prefix = "base_model.model."
    assert list(pick_modules(model, patterns)) == [f"{prefix}{name}" for name in found]


def test_a_pattern_that_finds_nothing_is_refused_with_a_name_that_would():
    with pytest.raises(ArgumentError, match=r"got 'layer\.\*', which match no module.*'model\.layers\.0'"):
        pick_modules(tiny_llama(), ["layer.*"])
