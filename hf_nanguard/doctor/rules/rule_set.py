"""All rules, and the judgement of facts by them."""

from collections.abc import Collection

from .finding import Examination, Rule
from .hyperparameter_rules import OPTIMIZER_RULES
from .model_rules import MODEL_RULES
from .online_rules import ONLINE_RULES
from .precision_rules import PRECISION_RULES
from .resource_rules import RESOURCE_RULES
from .run_facts import Facts

RULES: tuple[Rule, ...] = (*PRECISION_RULES, *OPTIMIZER_RULES, *ONLINE_RULES, *MODEL_RULES, *RESOURCE_RULES)
TOPICS = tuple(dict.fromkeys(rule.topic for rule in RULES))


def judge(facts: Facts, skip: Collection[str] = ()) -> Examination:
    """Applies every rule whose facts are known, except those whose name or topic is in `skip`."""
    result = Examination()
    for rule in RULES:
        if rule.name in skip or rule.topic in skip:
            continue
        if not rule.applies(facts):
            result.unchecked.append(rule.name)
        elif (found := rule.judge(facts)) is None:
            result.sound.append(rule.name)
        else:
            result.findings.append(found)
    return result
