"""The limits that are read off a model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_nanguard.hf.data.batch_limits import UNKNOWN, Limits, find_limits
from tests.models import VOCAB, tiny_llama

BERT = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def bert(kind=BertForSequenceClassification, **kwargs):
    return kind(BertConfig(**BERT, **kwargs))


def test_a_causal_model():
    assert find_limits(tiny_llama(), True) == Limits(VOCAB, True, True, VOCAB)


def test_an_encoder_decoder():
    config = T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    assert find_limits(T5ForConditionalGeneration(config), False) == Limits(40, True, False, 40)


def test_a_masked_language_model():
    assert find_limits(bert(BertForMaskedLM), False) == Limits(50, True, False, 50, 2, 512)


@pytest.mark.parametrize("kind", [BertForSequenceClassification, BertForTokenClassification])
def test_a_classifier_takes_its_classes(kind):
    assert find_limits(bert(kind, num_labels=3), False) == Limits(3, False, False, 50, 2, 512)


@pytest.mark.parametrize(
    "settings", [{"num_labels": 1}, {"num_labels": 3, "problem_type": "regression"},
                 {"num_labels": 3, "problem_type": "multi_label_classification"}],
)  # fmt: skip
def test_labels_that_are_no_classes_are_not_checked(settings):
    assert find_limits(bert(**settings), False).num_labels is None


def test_a_decoder_that_classifies():
    config = tiny_llama().config
    config.num_labels = 4
    assert find_limits(LlamaForSequenceClassification(config), False) == Limits(4, False, False, VOCAB)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]])
def test_the_limits_of_a_lora_model_are_those_of_its_base(targets):
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=targets, r=2))
    limits = find_limits(model, True)
    assert limits.num_labels == VOCAB
    assert limits.token_labels
    assert limits.num_ids in (VOCAB, None), "never a wrong number"


def test_a_resized_vocabulary_is_seen():
    model = tiny_llama()
    model.resize_token_embeddings(70, mean_resizing=False)
    assert find_limits(model, True) == Limits(70, True, True, 70)


def test_a_plain_module_is_not_known():
    assert find_limits(nn.Linear(2, 2), False) == UNKNOWN


def test_segmentation_labels_are_not_known():
    config = SegformerConfig(
        num_encoder_blocks=1, depths=[1], hidden_sizes=[4], num_attention_heads=[1], sr_ratios=[1], patch_sizes=[3],
        strides=[2], mlp_ratios=[1], decoder_hidden_size=4, num_labels=5,
    )  # fmt: skip
    assert find_limits(SegformerForSemanticSegmentation(config), False).num_labels is None


def test_placeholders_of_a_multimodal_model():
    config = LlavaConfig(
        text_config=tiny_llama().config, image_token_index=VOCAB + 1,
        vision_config={"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                       "num_attention_heads": 1, "image_size": 4, "patch_size": 2, "projection_dim": 4},
    )  # fmt: skip
    limits = find_limits(LlavaForConditionalGeneration(config), True)
    assert VOCAB + 1 in limits.placeholders
    assert limits.num_ids == VOCAB


def test_limits_are_plain_values():
    limits = find_limits(tiny_llama(), True)
    assert not any(isinstance(value, torch.Tensor) for value in vars(limits).values())
