"""What is played on several ranks: the run, the culprit planted in it, and all that must come of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hf_nanguard.testing import Fault

LLAMA, MEAN, NORM, OWN, SFT, GRPO = "llama", "mean", "norm", "own", "sft", "grpo"
# As in tests/laws/ways.py.
CLASS, ATTACH, CALLBACK, LATER, RUN = WAYS = (
    "class", "attach", "callback in the constructor", "callback added later", "nanguard run",
)  # fmt: skip
NAMED = {
    LLAMA: "model.layers.0.mlp.up_proj.weight",
    MEAN: "model.layers.0.mlp.up_proj.weight",
    NORM: "last.weight",
    OWN: "last.weight",
    SFT: "model.layers.0.mlp.up_proj.weight",
    GRPO: "model.layers.0.mlp.up_proj.weight",
}
FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
MAKING = -1  # the micro-step of what happens while completions are made
Place = tuple[int, int, int]


@dataclass(frozen=True)
class Expected:
    """An event that must be in the files: in rank 0's, and in that of the culprit's rank.

    Args:
        signal, action (`str`):
            As in the event.
        step, micro_step, rank:
            Where and on whom; `micro_step` is `None` where no single micro-batch is blamed.
        rows (`bool`):
            Whether the event must name the dataset rows of that micro-batch.
        parameter (`str`, *optional*):
            The parameter it must name.
    """

    signal: str
    action: str
    step: int
    micro_step: int | None
    rank: int
    rows: bool = True
    parameter: str | None = None


@dataclass(frozen=True)
class Scenario:
    """One guarded run on all ranks, and the stock run it must equal.

    Args:
        name (`str`):
            Unique in its suite.
        host (`str`):
            Model and trainer: `llama` (token losses), `mean` (the same by per-batch means), `norm` (BatchNorm and dropout
            in a plain module), `own` (the same, by a `training_step` that calls `loss.backward()`), `sft`, `grpo`.
        way (`str`):
            How the guard is put in, one of the five ways of `WAYS`.
        faults (`tuple[Fault, ...]`):
            The culprits. Kinds beyond those of `hf_nanguard.testing`: `late_error` (raised after the loss was computed), `snapshot` (copying the state before that
            step fails), `runner` (the guard's own runner cannot be built); and while completions are made: `sampling` (the
            logits of the first one are NaN), `policy` (`parameter` becomes NaN), `reward` (that of the first one is
            `value`), `reward_error` (the reward function fails).
        guard (`dict`):
            The `nanguard_` settings, without the prefix.
        accumulation (`int`):
            Micro-batches of a step.
        options (`dict`):
            Further training arguments.
        stock_faults (`tuple[Fault, ...]`):
            What the stock run has in their place, which it can cope with.
        compared (`bool`):
            Whether there is such a stock run.
        gone (`tuple[Place, ...]`):
            The (step, micro-step, rank) that the stock run never has.
        zeroed (`tuple[int, str]`, *optional*):
            The stock run zeroes the first gradient entry of that parameter in that step.
        stops_at (`int`, *optional*):
            The stock run ends after so many steps, and the guarded one must halt there.
        events (`tuple[Expected, ...]`):
            All events there may be, one to one.
        silent (`bool`):
            Whether the number of messages between ranks must be that of the stock run.
        profiled (`bool`):
            Count DDP's own messages too.
    """

    name: str
    host: str = LLAMA
    way: str = CLASS
    faults: tuple[Fault, ...] = ()
    guard: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    stock_faults: tuple[Fault, ...] = ()
    compared: bool = True
    gone: tuple[Place, ...] = ()
    zeroed: tuple[int, str] | None = None
    stops_at: int | None = None
    events: tuple[Expected, ...] = ()
    silent: bool = False
    profiled: bool = False


def whole_step(step: int, accumulation: int, world: int) -> tuple[Place, ...]:
    """Every micro-batch of a step on every rank."""
    return tuple((step, micro, rank) for micro in range(accumulation) for rank in range(world))


def healthy(world: int) -> list[Scenario]:
    """Nothing is wrong: the guard must not be seen, nor heard."""
    runs = [(host, way, 3) for host in (LLAMA, NORM, SFT) for way in (CLASS,)]
    runs += [(GRPO, CLASS, 2), (LLAMA, CLASS, 1)]
    return [
        Scenario(f"healthy-{host}-{n}", host, way, accumulation=n, silent=True, profiled=host == NORM)
        for host, way, n in runs
    ]


def by_every_way(goes: Callable[[int, int], tuple[Place, ...]], gradient: Expected) -> list[Scenario]:
    """The laws, one scenario each, for every way in: identity and silence, no trace, least loss, honesty, lockstep of a halt.

    Args:
        goes (`Callable`):
            Returns what is left out if a step and micro-step of rank 1 are bad.
        gradient (`Expected`):
            The event of a bad gradient.
    """
    loss, bad = Fault("loss", 1, 1, 1), Fault("gradient", 1, 1, 1, parameter=gradient.parameter)
    found = [
        Scenario("healthy", silent=True),
        Scenario("loss", faults=(loss,), gone=goes(1, 1), events=(Expected("loss_nonfinite", "dropped", 1, 1, 1),)),
        Scenario("gradient", faults=(bad,), gone=goes(1, 1), events=(gradient,)),
        Scenario("halt", faults=(loss,), guard={"on_nonfinite": "halt"}, stops_at=1,
                 events=(Expected("loss_nonfinite", "halted", 1, 1, 1),)),
    ]  # fmt: skip
    return [replace(s, name=f"way-{way.replace(' ', '-')}-{s.name}", way=way) for way in WAYS for s in found]


def dropped(world: int, culprit: int) -> list[Scenario]:
    """One bad micro-batch of one rank, of every kind and in every place."""
    found = []

    def add(
        name: str,
        host: str,
        faults: tuple[Fault, ...],
        signals: tuple[str, ...],
        accumulation: int = 3,
        way: str = CLASS,
        **more: Any,
    ) -> None:
        gone = tuple((f.step, f.micro_step, f.rank) for f in faults)
        events = tuple(
            Expected(signal, "dropped", *place, parameter=f.parameter)
            for f, signal, place in zip(faults, signals, gone, strict=True)
        )
        found.append(Scenario(name, host, way, faults, accumulation=accumulation, gone=gone, events=events, **more))

    for micro, where in enumerate(("first", "middle", "last")):
        for host in (LLAMA, NORM):
            bad = Fault("loss", step=1, micro_step=micro, rank=culprit)
            add(f"loss-{where}-{host}", host, (bad,), ("loss_nonfinite",))
            bad = Fault("gradient", step=1, micro_step=micro, rank=culprit, parameter=NAMED[host])
            add(f"gradient-{where}-{host}", host, (bad,), ("grad_nonfinite",))
        add(f"label-{where}", LLAMA, (Fault("label", 1, micro, culprit, 1000),), ("label_out_of_range",))
        add(f"masked-{where}", LLAMA, (Fault("label", 1, micro, culprit, None),), ("labels_masked",))
        add(
            f"error-{where}",
            LLAMA,
            (Fault("error", 1, micro, culprit),),
            ("loss_error",),
            guard={"on_loss_error": "drop"},
        )
        add(f"sft-{where}", SFT, (Fault("loss", 1, micro, culprit),), ("loss_nonfinite",))
    for kind, signal, value in (
        ("loss", "loss_nonfinite", float("inf")),
        ("error", "loss_error", None),
        ("label", "label_out_of_range", 1000),
    ):
        for host in (LLAMA, NORM) if kind != "label" else (LLAMA, SFT):
            every = tuple(Fault(kind, 1, micro, culprit, value) for micro in range(3))
            guard = {"on_loss_error": "drop"} if kind == "error" else {}
            add(f"{kind}-all-{host}", host, every, (signal,) * 3, guard=guard)
    for kind, signal, value in (("loss", "loss_nonfinite", float("nan")), ("label", "label_out_of_range", 1000)):
        for step in (0, 2):
            add(f"{kind}-single-{step}", LLAMA, (Fault(kind, step, 0, culprit, value),), (signal,), accumulation=1)
    # The tail of the epoch is a group of two micro-batches.
    add("loss-tail", LLAMA, (Fault("loss", 3, 1, culprit),), ("loss_nonfinite",))
    add("mean-tail", MEAN, (Fault("loss", 3, 0, culprit),), ("loss_nonfinite",))
    add("norm-last-step", NORM, (Fault("loss", 3, 0, culprit),), ("loss_nonfinite",))
    add("mean-middle", MEAN, (Fault("gradient", 1, 1, culprit, parameter=NAMED[MEAN]),), ("grad_nonfinite",))
    add("attached-sft", SFT, (Fault("gradient", 1, 1, culprit, parameter=NAMED[SFT]),), ("grad_nonfinite",), way=ATTACH)
    add("sft-single", SFT, (Fault("loss", 1, 0, culprit),), ("loss_nonfinite",), accumulation=1)
    add("grpo-loss", GRPO, (Fault("loss", 1, 0, culprit),), ("loss_nonfinite",), accumulation=2)
    add(
        "grpo-gradient",
        GRPO,
        (Fault("gradient", 1, 1, culprit, parameter=NAMED[GRPO]),),
        ("grad_nonfinite",),
        accumulation=2,
    )
    add("input", NORM, (Fault("input", 1, 1, culprit, field="x"),), ("input_nonfinite",))
    # Buckets are rebuilt by a collective in the first forward after the first reduction.
    strict = {"options": {"ddp_find_unused_parameters": False}}
    add(
        "label-first-step-rebuilt",
        LLAMA,
        (Fault("label", 0, 0, culprit, 1000),),
        ("label_out_of_range",),
        accumulation=1,
        **strict,
    )
    add(
        "loss-first-step-rebuilt", LLAMA, (Fault("loss", 0, 0, culprit),), ("loss_nonfinite",), accumulation=1, **strict
    )
    every = tuple(Fault("label", 0, micro, culprit, 1000) for micro in range(3))
    add("label-all-first-step-rebuilt", LLAMA, every, ("label_out_of_range",) * 3, **strict)
    # Two ranks, two faults: each is blamed for its own.
    other = (culprit + 1) % world
    both = (Fault("loss", 1, 0, culprit), Fault("label", 1, 2, other, 1000))
    add("two-culprits", LLAMA, both, ("loss_nonfinite", "label_out_of_range"))
    add(
        "late-error-last",
        LLAMA,
        (Fault("late_error", 1, 2, culprit),),
        ("loss_error",),
        guard={"on_loss_error": "drop"},
    )
    add(
        "late-error-first",
        LLAMA,
        (Fault("late_error", 1, 0, culprit),),
        ("loss_error",),
        guard={"on_loss_error": "drop"},
    )
    add("late-error-sft", SFT, (Fault("late_error", 1, 1, culprit),), ("loss_error",), guard={"on_loss_error": "drop"})
    add("error-sft", SFT, (Fault("error", 1, 1, culprit),), ("loss_error",), guard={"on_loss_error": "drop"})
    for kind in ("error", "late_error"):
        bad = Fault(kind, 1, 0, culprit)
        add(f"{kind}-grpo-first", GRPO, (bad,), ("loss_error",), guard={"on_loss_error": "drop"}, accumulation=2)
    add(
        "error-grpo",
        GRPO,
        (Fault("error", 1, 1, culprit),),
        ("loss_error",),
        guard={"on_loss_error": "drop"},
        accumulation=2,
    )
    return found


def policies(world: int, culprit: int) -> list[Scenario]:
    """What is not a plain drop."""
    loss = Fault("loss", 1, 1, culprit)
    gradient = Fault("gradient", 1, 1, culprit, parameter=NAMED[LLAMA])
    label = Fault("label", 1, 1, culprit, 1000)
    whole = whole_step(1, 3, world)
    found = [
        Scenario("floor-loss", faults=(loss,), guard={"on_nonfinite": "floor"}, gone=((1, 1, culprit),),
                 events=(Expected("loss_nonfinite", "dropped", 1, 1, culprit),)),
        Scenario("skip-loss", faults=(loss,), guard={"on_nonfinite": "skip"}, gone=whole,
                 events=(Expected("loss_nonfinite", "skipped", 1, 1, culprit),)),
        Scenario("skip-gradient", faults=(gradient,), guard={"on_nonfinite": "skip"}, gone=whole,
                 events=(Expected("grad_nonfinite", "skipped", 1, 1, culprit, parameter=NAMED[LLAMA]),)),
        Scenario("skip-label", faults=(label,), guard={"on_nonfinite": "skip"}, gone=((1, 1, culprit),),
                 events=(Expected("label_out_of_range", "dropped", 1, 1, culprit),)),
        Scenario("repair-gradient", faults=(gradient,), guard={"on_nonfinite": "repair"}, zeroed=(1, NAMED[LLAMA]),
                 events=(Expected("grad_nonfinite", "repaired", 1, 1, culprit, parameter=NAMED[LLAMA]),)),
        Scenario("repair-loss", faults=(loss,), guard={"on_nonfinite": "repair"}, gone=whole,
                 events=(Expected("loss_nonfinite", "skipped", 1, 1, culprit),)),
        Scenario("halt-loss", faults=(loss,), guard={"on_nonfinite": "halt"}, stops_at=1,
                 events=(Expected("loss_nonfinite", "halted", 1, 1, culprit),)),
        Scenario("halt-gradient", faults=(gradient,), guard={"on_nonfinite": "halt"}, stops_at=1,
                 events=(Expected("grad_nonfinite", "halted", 1, 1, culprit, parameter=NAMED[LLAMA]),)),
        Scenario("halt-input", faults=(label,), guard={"on_bad_input": "halt"}, stops_at=1,
                 events=(Expected("label_out_of_range", "halted", 1, 1, culprit),)),
        Scenario("halt-sft", SFT, faults=(loss,), guard={"on_nonfinite": "halt"}, stops_at=1,
                 events=(Expected("loss_nonfinite", "halted", 1, 1, culprit),)),
        # Only one rank knows of a NaN loss with finite gradients; its mark in the gradients tells the others.
        *(Scenario(f"constant-loss-{micro}", faults=(Fault("constant", 1, micro, culprit),), gone=((1, micro, culprit),),
                   events=(Expected("loss_nonfinite", "dropped", 1, micro, culprit),)) for micro in (1, 2)),
        Scenario("own-backward", OWN, silent=True),
        Scenario("own-backward-constant-loss", OWN, faults=(Fault("constant", 1, 1, culprit),), gone=((1, 1, culprit),),
                 events=(Expected("loss_nonfinite", "dropped", 1, 1, culprit),)),
        Scenario("constant-loss-skipped", faults=(Fault("constant", 1, 1, culprit),), guard={"on_nonfinite": "skip"},
                 gone=whole_step(1, 3, world), events=(Expected("loss_nonfinite", "skipped", 1, 1, culprit),)),
        # One rank has run its batch again, the other knew without: both must be as before.
        Scenario("nothing-left", accumulation=1, gone=whole_step(1, 1, world),
                 faults=tuple(Fault("loss", 1, 0, r) if r == culprit else Fault("label", 1, 0, r, None) for r in range(world)),
                 events=tuple(Expected("loss_nonfinite" if r == culprit else "labels_masked", "skipped", 1, 0, r) for r in range(world))),
        Scenario("nothing-left-twice", NORM, gone=(*whole_step(1, 3, world), *whole_step(2, 3, world)),
                 faults=tuple(Fault("loss", s, m, r) for s in (1, 2) for m in range(3) for r in range(world)),
                 events=tuple(Expected("loss_nonfinite", "skipped", s, m, r) for s in (1, 2) for m in range(3) for r in range(world))),
        # The weights of one rank are bad, so its batches are too; all ranks go back to the state before step 0.
        Scenario("rewind", guard={"autopsy": False}, faults=(Fault("weight", 1, 1, culprit, parameter=NAMED[LLAMA]),),
                 gone=(*whole_step(0, 3, world), *whole_step(1, 3, world)),
                 events=(*(Expected("loss_nonfinite", "dropped", 1, micro, culprit) for micro in range(3)),
                         Expected("param_nonfinite", "rewound", 1, None, 0, rows=False, parameter=NAMED[LLAMA]))),
        # One rank cannot take the snapshot before step 0, so none has it; those before steps 1 and 2 are taken.
        Scenario("snapshot-fails", guard={"autopsy": False, "snapshot_steps": 1}, gone=whole_step(2, 3, world),
                 faults=(Fault("snapshot", 0, 0, culprit), Fault("weight", 2, 1, culprit, parameter=NAMED[LLAMA])),
                 events=(Expected("guard_failed", "observed", 0, None, culprit, rows=False),
                         *(Expected("loss_nonfinite", "dropped", 2, micro, culprit) for micro in range(3)),
                         Expected("param_nonfinite", "rewound", 2, None, 0, rows=False, parameter=NAMED[LLAMA]))),
        # One rank cannot build its runner at first, so no rank guards that group. It is skipped if it is bad, with what it has drawn.
        Scenario("runner-fails", guard={"autopsy": False}, compared=False,
                 faults=(Fault("runner", 0, 0, culprit), Fault("loss", 0, 1, (culprit + 1) % world)),
                 events=(Expected("guard_failed", "observed", 0, None, culprit, rows=False),
                         Expected("grad_nonfinite", "skipped", 0, None, 0, rows=False))),
        Scenario("runner-fails-healthy", guard={"autopsy": False}, faults=(Fault("runner", 0, 0, culprit),),
                 events=(Expected("guard_failed", "observed", 0, None, culprit, rows=False),)),
        Scenario("transient", faults=(Fault("gradient", 1, 1, culprit, parameter=NAMED[LLAMA], once=True),),
                 events=(Expected("grad_nonfinite", "repaired", 1, None, 0, rows=False, parameter=NAMED[LLAMA]),)),
    ]  # fmt: skip
    return found


def rollouts(world: int, culprit: int) -> list[Scenario]:
    """What goes wrong on one rank while completions are made and scored."""

    def bad(kind: str, rank: int, **more: Any) -> Fault:
        return Fault(kind, 1, micro_step=MAKING, rank=rank, **more)

    def told(signal: str, action: str, rank: int, parameter: str | None = None) -> Expected:
        return Expected(signal, action, 1, None, rank, rows=False, parameter=parameter)

    # TRL leaves out a completion whose reward is None, so that is the run that a bad one must equal.
    none = (bad("reward", culprit, value=None),)
    every = (bad("reward_error", culprit, value=None),)
    found = [
        Scenario("sampling", faults=(bad("sampling", culprit),), compared=False,
                 events=(told("logits_nonfinite", "dropped", culprit),)),
        Scenario("sampling-everywhere", faults=tuple(bad("sampling", r) for r in range(world)), compared=False,
                 events=tuple(told("logits_nonfinite", "dropped", r) for r in range(world))),
        Scenario("policy", faults=tuple(bad("policy", r, parameter=NAMED[GRPO]) for r in range(world)), compared=False, stops_at=1,
                 guard={"max_rewinds": 0},
                 events=(*(told("logits_nonfinite", "dropped", r) for r in range(world)),
                         told("param_nonfinite", "halted", 0, NAMED[GRPO]))),
        Scenario("reward-inf", faults=(bad("reward", culprit, value=float("inf")),), stock_faults=none,
                 events=(told("reward_nonfinite", "dropped", culprit),)),
        Scenario("reward-nan", faults=(bad("reward", culprit),), stock_faults=none,
                 events=(told("reward_nonfinite", "dropped", culprit),)),
        Scenario("reward-error", faults=(bad("reward_error", culprit),), stock_faults=every,
                 events=(told("reward_nonfinite", "dropped", culprit),)),
        Scenario("reward-halt", faults=(bad("reward", culprit),), guard={"on_bad_reward": "halt"}, compared=False, stops_at=1,
                 events=(told("reward_nonfinite", "halted", culprit),)),
    ]  # fmt: skip
    return [replace(s, name=f"grpo-{s.name}", host=GRPO, accumulation=2) for s in found]


def main_suite(world: int) -> list[Scenario]:
    """Everything, the culprit being the last rank, and what matters once more with rank 0 as the culprit."""
    last = world - 1
    zero = [
        s for s in (*dropped(world, 0), *policies(world, 0))
        if s.name in ("loss-all-norm", "label-all-llama", "gradient-middle-llama", "label-first-step-rebuilt", "halt-loss")
    ]  # fmt: skip
    bad = Expected("grad_nonfinite", "dropped", 1, 1, 1, parameter=NAMED[LLAMA])
    return [
        *healthy(world),
        *(by_every_way(lambda step, micro: ((step, micro, 1),), bad) if world == 2 else ()),
        *dropped(world, last),
        *policies(world, last),
        *rollouts(world, last),
        *(replace(s, name=f"{s.name}-rank0") for s in zero),
    ]


def four_suite() -> list[Scenario]:
    """Four ranks, one sample a batch, as only 61 rows can be told apart."""
    label = Fault("label", 1, 1, 1, 1000)
    every = tuple(Fault("loss", 1, micro, 3) for micro in range(3))
    found = [
        Scenario("healthy", silent=True),
        Scenario("loss-middle", faults=(Fault("loss", 1, 1, 2),), gone=((1, 1, 2),),
                 events=(Expected("loss_nonfinite", "dropped", 1, 1, 2),)),
        Scenario("gradient-last", faults=(Fault("gradient", 1, 2, 3, parameter=NAMED[LLAMA]),), gone=((1, 2, 3),),
                 events=(Expected("grad_nonfinite", "dropped", 1, 2, 3, parameter=NAMED[LLAMA]),)),
        Scenario("label", faults=(label,), gone=((1, 1, 1),), events=(Expected("label_out_of_range", "dropped", 1, 1, 1),)),
        Scenario("loss-all", faults=every, gone=tuple((1, micro, 3) for micro in range(3)),
                 events=tuple(Expected("loss_nonfinite", "dropped", 1, micro, 3) for micro in range(3))),
        Scenario("three-culprits", faults=(Fault("loss", 1, 0, 0), label, Fault("gradient", 1, 2, 3, parameter=NAMED[LLAMA])),
                 gone=((1, 0, 0), (1, 1, 1), (1, 2, 3)),
                 events=(Expected("loss_nonfinite", "dropped", 1, 0, 0), Expected("label_out_of_range", "dropped", 1, 1, 1),
                         Expected("grad_nonfinite", "dropped", 1, 2, 3, parameter=NAMED[LLAMA]))),
        Scenario("halt", faults=(Fault("loss", 1, 1, 2),), guard={"on_nonfinite": "halt"}, stops_at=1,
                 events=(Expected("loss_nonfinite", "halted", 1, 1, 2),)),
    ]  # fmt: skip
    return [replace(s, options={"per_device_train_batch_size": 1}) for s in found]


def accelerate_suite() -> list[Scenario]:
    """What tells whether ranks that accelerate started find each other."""
    wanted = ("healthy-llama-3", "loss-middle-llama", "label-middle", "halt-loss")
    return [s for s in main_suite(2) if s.name in wanted]


def fsdp_suite() -> list[Scenario]:
    """Sharded parameters on two ranks: a bad micro-batch goes on both, its rank alone is blamed if it is known."""

    def at(step: int, micro: int) -> tuple[Place, ...]:
        return ((step, micro, 0), (step, micro, 1))

    found = [Scenario(f"healthy-{host}-{n}", host, accumulation=n, silent=True, profiled=host == LLAMA)
             for host, n in ((LLAMA, 3), (SFT, 3))]  # fmt: skip
    for culprit in (0, 1):
        found += [
            Scenario(f"loss-middle-rank{culprit}", faults=(Fault("loss", 1, 1, culprit),), gone=at(1, 1),
                     events=(Expected("loss_nonfinite", "dropped", 1, 1, culprit),)),
            Scenario(f"label-middle-rank{culprit}", faults=(Fault("label", 1, 1, culprit, 1000),), gone=at(1, 1),
                     events=(Expected("label_out_of_range", "dropped", 1, 1, culprit),)),
        ]  # fmt: skip
    return [replace(s, options={**s.options, "fsdp": True, "fsdp_config": dict(FSDP)}) for s in [
        *found,
        Scenario("healthy-llama-1", accumulation=1, silent=True),
        Scenario("loss-single", faults=(Fault("loss", 1, 0, 1),), gone=at(1, 0), accumulation=1,
                 events=(Expected("loss_nonfinite", "skipped", 1, 0, 1),)),
        Scenario("label-single", faults=(Fault("label", 1, 0, 0, 1000),), gone=at(1, 0), accumulation=1,
                 events=(Expected("label_out_of_range", "skipped", 1, 0, 0),)),
        Scenario("loss-sft", SFT, faults=(Fault("loss", 1, 1, 1),), gone=at(1, 1),
                 events=(Expected("loss_nonfinite", "dropped", 1, 1, 1),)),
        Scenario("gradient-middle", faults=(Fault("gradient", 1, 1, 1),), gone=at(1, 1),
                 events=(Expected("grad_nonfinite", "dropped", 1, 1, 0, rows=False),)),
        Scenario("two-culprits", faults=(Fault("loss", 1, 0, 0), Fault("label", 1, 2, 1, 1000)), gone=(*at(1, 0), *at(1, 2)),
                 events=(Expected("loss_nonfinite", "dropped", 1, 0, 0), Expected("label_out_of_range", "dropped", 1, 2, 1))),
        Scenario("skip-loss", faults=(Fault("loss", 1, 1, 1),), guard={"on_nonfinite": "skip"}, gone=whole_step(1, 3, 2),
                 events=(Expected("loss_nonfinite", "skipped", 1, 1, 1),)),
        Scenario("halt-loss", faults=(Fault("loss", 1, 1, 1),), guard={"on_nonfinite": "halt"}, stops_at=1,
                 events=(Expected("loss_nonfinite", "halted", 1, 1, 1),)),
        Scenario("error-middle", faults=(Fault("error", 1, 1, 1),), gone=at(1, 1), guard={"on_loss_error": "drop"},
                 events=(Expected("loss_error", "dropped", 1, 1, 1),)),
        Scenario("attached-without-clip", way=ATTACH, faults=(Fault("loss", 1, 1, 1),), gone=at(1, 1), options={"max_grad_norm": 0.0},
                 events=(Expected("loss_nonfinite", "dropped", 1, 1, 1),)),
        *by_every_way(at, Expected("grad_nonfinite", "dropped", 1, 1, 0, rows=False)),
        # A bad shard of one rank is a bad weight of all. Weights and moments, each rank its shards, go back to those before step 2.
        Scenario("rewind", guard={"autopsy": False, "snapshot_steps": 1}, gone=whole_step(2, 3, 2),
                 faults=(Fault("weight", 2, 1, 1, parameter=NAMED[LLAMA]),),
                 events=(*(Expected("loss_nonfinite", "skipped", 2, micro, rank) for micro in range(3) for rank in range(2)),
                         Expected("param_nonfinite", "rewound", 2, None, 0, rows=False, parameter=NAMED[LLAMA]))),
        Scenario("checkpointing-bf16", faults=(Fault("loss", 1, 1, 1),), gone=at(1, 1),
                 options={"gradient_checkpointing": True, "bf16": True},
                 events=(Expected("loss_nonfinite", "dropped", 1, 1, 1),)),
    ]]  # fmt: skip


def refused_suite() -> list[Scenario]:
    """A loss that fails on one rank after its sharded forward: no stand-in can take its place."""
    options = {"fsdp": True, "fsdp_config": dict(FSDP)}
    late = Scenario(
        "late-error", faults=(Fault("late_error", 1, 1, 1),), guard={"on_loss_error": "drop"}, options=options
    )
    return [late]


# Scenarios for `make slow`: the same fault, policy or trainer stays in `make test` with another one.
VARIANTS = {
    "two": (
        "loss-middle-llama", "gradient-middle-norm", "loss-last-norm", "gradient-last-llama", "label-middle", "masked-last",
        "error-middle", "sft-last", "loss-all-llama", "error-all-norm", "label-all-sft", "loss-single-2", "label-single-0",
        "mean-tail", "attached-sft", "sft-single", "grpo-gradient", "loss-first-step-rebuilt", "error-sft", "skip-gradient",
        "halt-gradient", "halt-sft", "grpo-sampling-everywhere", "grpo-reward-inf",
    ),
    "fsdp": ("healthy-llama-1", "loss-middle-rank0", "label-middle-rank1", "loss-sft", "skip-loss"),
}  # fmt: skip


QUICK_WAYS = {
    "two": (
        "way-attach-gradient", "way-callback-in-the-constructor-gradient", "way-callback-added-later-healthy",
        "way-callback-added-later-gradient", "way-nanguard-run-gradient",
    ),
    "fsdp": ("way-callback-in-the-constructor-loss", "way-callback-added-later-loss", "way-nanguard-run-loss"),
}  # fmt: skip


def split(suite: str, scenarios: list[Scenario]) -> dict[str, list[Scenario]]:
    """Splits a suite into what `make test` runs and the variants that `make slow` runs."""
    unknown = set(VARIANTS[suite]) - {s.name for s in scenarios}
    assert not unknown, unknown
    places = ("-first", "-first-llama", "-first-norm", "-rank0") if suite == "two" else ()
    variants = [
        s for s in scenarios
        if s.name in VARIANTS[suite] or s.name.endswith(places) or (s.name.startswith("way-") and s.name not in QUICK_WAYS[suite])
    ]  # fmt: skip
    return {suite: [s for s in scenarios if s not in variants], f"{suite}_variants": variants}


SUITES = {
    **split("two", main_suite(2)), **split("fsdp", fsdp_suite()), "four": four_suite(), "accelerate": accelerate_suite(),
    "fsdp_refused": refused_suite(),
}  # fmt: skip
