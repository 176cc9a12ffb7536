"""Tiny models of many architectures, built from config, each with a batch that has padding where it can.

What a test of localisation needs to know about an architecture is here too: where hidden states of shape (batch, token,
feature) come out, which linear layer to overload, which table of embeddings is looked up and with which input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .models import VOCAB

BATCH = 3
LENGTH = 8
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = {**SIZES, "vocab_size": VOCAB, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}


@dataclass(frozen=True)
class Architecture:
    """An architecture and where things are in it.

    Args:
        name (`str`):
            What it is called in the tests.
        make (`Callable`):
            Returns a model; `attention` is `"eager"` or `"sdpa"`.
        batch (`Callable`):
            Returns its inputs.
        block (`str`):
            A module that returns hidden states (batch, token, feature), or a tuple that begins with them.
        linear (`str`):
            A linear layer, or the like, whose output overflows if its weights are large.
        line (`str`):
            What the source line says that calls it.
        embedding, ids (`str`, *optional*):
            A table of embeddings, and the input it is looked up with.
        field (`str`, *optional*):
            A float input.
        gated (`tuple`, *optional*):
            Gate, up and their module, for a gated MLP.
        gated_line (`str`, *optional*):
            What its line says.
        sdpa (`bool`):
            Whether it also runs with `attention="sdpa"`.
    """

    name: str
    make: Callable[[str], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    block: str
    linear: str
    line: str
    embedding: str | None = None
    ids: str = "input_ids"
    field: str | None = None
    gated: tuple[str, str, str] | None = None
    gated_line: str = ""
    sdpa: bool = True

    def build(self, dtype: torch.dtype = torch.float32, attention: str = "eager") -> nn.Module:
        """Returns a fresh model in training mode, always the same."""
        torch.manual_seed(0)
        return self.make(attention).to(dtype).train()

    def inputs(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Returns a fresh batch, always the same; no token comes twice, so that a row of a table belongs to one."""
        torch.manual_seed(1)
        batch = self.batch()
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def _tokens() -> Tensor:
    return torch.randperm(VOCAB - 8)[: BATCH * LENGTH].reshape(BATCH, LENGTH) + 4


def _padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The last sample ends two tokens early."""
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return ids.masked_fill(mask == 0, 0), mask


def _causal_batch() -> dict[str, Tensor]:
    ids, mask = _padded(_tokens())
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _sequence_batch() -> dict[str, Tensor]:
    batch = _causal_batch()
    labels = torch.randint(4, VOCAB, (BATCH, 5))
    labels[1, -2:] = -100
    return {**batch, "labels": labels}


def _audio_batch() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, 400, dtype=torch.long)
    mask[-1, 300:] = 0
    labels = torch.randint(1, 20, (BATCH, 4))
    labels[1, -1:] = -100
    return {"input_values": torch.randn(BATCH, 400), "attention_mask": mask, "labels": labels}


def _image_batch() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.arange(BATCH)}


def _whisper_batch() -> dict[str, Tensor]:
    labels = torch.randint(4, VOCAB, (BATCH, 5))
    labels[1, -2:] = -100
    return {"input_features": torch.randn(BATCH, 8, 40), "labels": labels}


def _llava_batch() -> dict[str, Tensor]:
    batch = _causal_batch()
    ids = torch.cat([torch.full((BATCH, 4), VOCAB - 1), batch["input_ids"]], 1)
    mask = torch.cat([torch.ones(BATCH, 4, dtype=torch.long), batch["attention_mask"]], 1)
    labels = torch.cat([torch.full((BATCH, 4), -100), batch["labels"]], 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "pixel_values": torch.randn(BATCH, 3, 16, 16)}


def _decoder(config: str, model: str, **more: Any) -> Callable[[str], nn.Module]:
    def make(attention: str) -> nn.Module:
        settings = getattr(transformers, config)(**{**DECODER, **more}, attn_implementation=attention)
        return getattr(transformers, model)(settings)

    return make


def _make_llava(attention: str) -> nn.Module:
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8, attn_implementation=attention)
    text = transformers.LlamaConfig(**DECODER, attn_implementation=attention)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=VOCAB - 1, attn_implementation=attention,
        vision_feature_select_strategy="default", vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def _make_wav2vec2(attention: str) -> nn.Module:
    config = transformers.Wav2Vec2Config(
        **SIZES, vocab_size=20, conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0,
        attn_implementation=attention, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def _make_whisper(attention: str) -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        attn_implementation=attention,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def _llama_like(name: str, config: str, model: str, sdpa: bool = True, **more: Any) -> Architecture:
    mlp = "model.layers.1.mlp"
    line = "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
    return Architecture(
        name, _decoder(config, model, **more), _causal_batch, block=mlp, linear=f"{mlp}.up_proj", line=line,
        embedding="model.embed_tokens", gated=(f"{mlp}.gate_proj", f"{mlp}.up_proj", mlp), gated_line=line, sdpa=sdpa,
    )  # fmt: skip


ARCHITECTURES: tuple[Architecture, ...] = (
    _llama_like("llama", "LlamaConfig", "LlamaForCausalLM"),
    _llama_like("qwen2", "Qwen2Config", "Qwen2ForCausalLM", use_sliding_window=False),
    _llama_like("qwen3", "Qwen3Config", "Qwen3ForCausalLM", head_dim=8),
    _llama_like("gemma2", "Gemma2Config", "Gemma2ForCausalLM", sdpa=False, head_dim=8, sliding_window=4),
    _llama_like("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", head_dim=8, sliding_window=4),
    Architecture(
        "mixtral", _decoder("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, output_router_logits=True),
        _causal_batch, block="model.layers.1.mlp", linear="model.layers.1.self_attn.q_proj",
        line="query_states = self.q_proj(hidden_states)", embedding="model.embed_tokens",
    ),
    Architecture(
        "gpt2",
        lambda attention: transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_implementation=attention,
            bos_token_id=1, eos_token_id=2)),
        _causal_batch, block="transformer.h.1.mlp", linear="transformer.h.1.mlp.c_fc",
        line="x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)", embedding="transformer.wte",
    ),
    Architecture(
        "bert",
        lambda attention: transformers.BertForSequenceClassification(transformers.BertConfig(
            **SIZES, vocab_size=VOCAB, max_position_embeddings=64, num_labels=3, attn_implementation=attention)),
        lambda: {**_causal_batch(), "labels": torch.arange(BATCH)}, block="bert.encoder.layer.0.output",
        linear="bert.encoder.layer.1.intermediate.dense", line="hidden_states = self.dense(hidden_states)",
        embedding="bert.embeddings.word_embeddings",
    ),
    Architecture(
        "t5",
        lambda attention: transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0,
            feed_forward_proj="gated-gelu", attn_implementation=attention)),
        _sequence_batch, block="encoder.final_layer_norm", linear="encoder.block.1.layer.1.DenseReluDense.wi_1",
        line="hidden_linear = self.wi_1(hidden_states)", embedding="encoder.embed_tokens",
        gated=("encoder.block.1.layer.1.DenseReluDense.wi_0", "encoder.block.1.layer.1.DenseReluDense.wi_1",
               "encoder.block.1.layer.1.DenseReluDense"),
        gated_line="hidden_states = hidden_gelu * hidden_linear",
    ),
    Architecture(
        "llava", _make_llava, _llava_batch, block="model.language_model.layers.1.mlp",
        linear="model.language_model.layers.1.self_attn.q_proj", line="query_states = self.q_proj(hidden_states)",
        embedding="model.language_model.embed_tokens", field="pixel_values",
    ),
    Architecture(
        "wav2vec2", _make_wav2vec2, _audio_batch, block="wav2vec2.encoder.layers.1.feed_forward",
        linear="wav2vec2.encoder.layers.1.feed_forward.intermediate_dense",
        line="hidden_states = self.intermediate_dense(hidden_states)", field="input_values",
    ),
    Architecture(
        "vit",
        lambda attention: transformers.ViTForImageClassification(transformers.ViTConfig(
            **SIZES, image_size=16, patch_size=8, num_labels=BATCH, attn_implementation=attention)),
        _image_batch, block="vit.layers.1.mlp", linear="vit.layers.1.mlp.fc1", line="self.fc1(", field="pixel_values",
    ),
    Architecture(
        "whisper", _make_whisper, _whisper_batch, block="model.encoder.layer_norm",
        linear="model.encoder.layers.0.fc1", line="hidden_states = self.activation_fn(self.fc1(hidden_states))",
        field="input_features",
    ),
)  # fmt: skip
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
