"""Every planted fault is named rightly, on every architecture, and nothing healthy is ever blamed.

By default all faults strike a Llama and every architecture meets a few; the full product is slow.
"""

import pytest
import torch

from tests.architectures import BY_NAME

from .matrix import BRAIN, FAULTS, HALF, SINGLE, find_in, run_planted
from .native import NATIVE, run_native

PLANTED_EVERYWHERE = ("matmul_fp16", "log_zero", "sqrt_zero", "where_sqrt")
NATIVE_EVERYWHERE = ("linear_fp16", "nan_weight", "nan_input", "gated_mlp_fp16", "nan_expert")
NAMES = tuple(BY_NAME)
OTHERS = NAMES[1:]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_in_a_llama(fault):
    assert run_planted(BY_NAME["llama"], fault) == []


@pytest.mark.parametrize("fault", [fault for fault in NATIVE if fault not in ("nan_input", "nan_expert")])
def test_native_fault_of_a_llama(fault):
    assert run_native(BY_NAME["llama"], fault) == []


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("fault", PLANTED_EVERYWHERE)
def test_planted_fault_in_every_architecture(name, fault):
    assert run_planted(BY_NAME[name], fault) == []


@pytest.mark.parametrize("name", OTHERS)
def test_native_faults_of_every_architecture(name):
    applicable = [fault for fault in NATIVE_EVERYWHERE if NATIVE[fault](BY_NAME[name]) is not None]
    assert len(applicable) >= 2
    assert {fault: run_native(BY_NAME[name], fault) for fault in applicable} == {fault: [] for fault in applicable}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_found_in_a_healthy_pass(name):
    architecture = BY_NAME[name]
    for dtype in (SINGLE, HALF, BRAIN):
        for attention in ("eager", "sdpa") if architecture.sdpa else ("eager",):
            if attention == "sdpa" and not architecture.build(dtype, "eager")._supports_sdpa:
                continue  # T5 of older transformers
            model, inputs = architecture.build(dtype, attention), architecture.inputs(dtype)
            torch.manual_seed(2)  # for dropout
            origin, loss = find_in(model, lambda m=model, i=inputs: m(**i).loss, inputs)
            assert origin is None, (dtype, attention)
            torch.manual_seed(2)
            assert loss == model(**inputs).loss.item(), (dtype, attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_planted_faults_full_product(name, attention):
    architecture = BY_NAME[name]
    if attention == "sdpa" and not architecture.sdpa:
        pytest.skip(f"{name} has no sdpa attention")
    wrong = {fault: run_planted(architecture, fault, attention) for fault in FAULTS}
    assert {fault: what for fault, what in wrong.items() if what} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_native_faults_full_product(name):
    wrong = {fault: run_native(BY_NAME[name], fault) for fault in NATIVE}
    assert {fault: what for fault, what in wrong.items() if what} == {}
