"""Access to attention and routers of transformers models, each with the condition under which it can go."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from ...boundary import Boundary, HostCall


@contextmanager
def observed_attention(observe: Callable[..., None], boundary: Boundary) -> Iterator[None]:
    """Calls `observe(implementation, module, query, key, mask, options)` before every attention that a layer computes with a
    function of transformers' attention interface.

    The lookup is wrapped instead of the functions, because `"eager"` belongs to each model and is in no table. Can go when
    transformers has hooks on attention.
    """
    original = AttentionInterface.get_interface

    def get_interface(
        host: HostCall, interface: AttentionInterface, implementation: str, default: Callable[..., object]
    ) -> Callable[..., object]:
        def attend(
            host: HostCall, /, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object,
            *args: object, **kwargs: object,
        ) -> object:  # fmt: skip
            observe(implementation, module, query, key, attention_mask, kwargs)
            return host(module, query, key, value, attention_mask, *args, **kwargs)

        return boundary.overriding("attention hooks", attend, host(interface, implementation, default))

    wrapped = boundary.overriding("attention hooks", get_interface, original)
    AttentionInterface.get_interface = wrapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        AttentionInterface.get_interface = original  # type: ignore[method-assign]


def implies_causality(
    implementation: str, module: nn.Module, query: Tensor, mask: object, options: dict[str, object]
) -> bool:
    """Returns whether an attention without a mask is causal, by the rule of `sdpa_attention_forward`.

    Can go together with `observed_attention`.
    """
    asked = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if asked is None else asked
    return implementation == "sdpa" and mask is None and query.shape[2] > 1 and bool(causal)


def find_routers(model: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """Returns name, module and position in its output of everything that a transformers model, or one inside `model`,
    declares as router logits.

    Can go when transformers lists the modules behind a recordable output.
    """
    found: dict[int, tuple[str, nn.Module, int]] = {}
    for prefix, owner in model.named_modules():
        declared = owner.can_record_outputs.get("router_logits", []) if isinstance(owner, PreTrainedModel) else []
        for spec in declared if isinstance(declared, list) else [declared]:
            recorder = spec if isinstance(spec, OutputRecorder) else None
            target, suffix = (None, spec) if isinstance(spec, str) else (spec, None)
            index, layer = 1, ""
            if recorder is not None:
                target, suffix, index = recorder.target_class, recorder.class_name, recorder.index
                layer = "" if recorder.layer_name is None else f".{recorder.layer_name.strip('.')}."
            for name, module in owner.named_modules(prefix=prefix):
                by_class = target is not None and isinstance(module, target)
                by_name = suffix is not None and name.endswith(suffix)
                if (by_class or by_name) and layer in f".{name}.":
                    found.setdefault(id(module), (name, module, index))
    return list(found.values())
