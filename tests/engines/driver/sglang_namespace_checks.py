"""Checks of SGLang's namespaces: adapters, extra keys and salts share no cached blocks, whatever their prompts have in common."""

from __future__ import annotations

from hits import Hits, Tally
from prompts import Prompt, completion, ids
from sglang_variants import ADAPTERS

LENGTHS = (33, 64, 200, 1000)


def _asked(hits: Hits, prompts: list[Prompt], rounds: int = 2) -> list[Tally]:
    """A tally for every round."""
    return [Tally([hits.ask(prompt)[0] for prompt in prompts]) for _ in range(rounds)]


def _all(tallies: list[Tally]) -> Tally:
    return Tally([one for tally in tallies for one in tally.seen])


def adapters_share_no_blocks(hits: Hits) -> str:
    """Base model and adapters are predicted apart; an adapter is named with the model, or by a member of the body."""
    models = ["tiny", *(f"tiny:{adapter}" for adapter in ADAPTERS)]
    sent = [
        completion(f"{length} ids of {model}", ids(4000 + length, length), model=model)
        for length in LENGTHS
        for model in models
    ]
    tallies = _asked(hits, sent)
    assert not any(one.found for one in tallies[0].seen), f"models share blocks: {tallies[0].seen}"
    by_member = [
        completion(f"{length} ids, lora_path {adapter}", ids(4000 + length, length), lora_path=adapter)
        for length in LENGTHS
        for adapter in ADAPTERS
    ]
    tallies += _asked(hits, by_member, 1)
    assert tallies[2].seen[-1].found > 900, f"lora_path names another adapter than the model: {tallies[2].seen[-1]}"
    return _all(tallies).text()


def adapters_with_keys_and_salts(hits: Hits) -> str:
    """An adapter's blocks differ by extra key and salt, and are predicted also in SGLang's own format of events."""
    variants = [{}, {"extra_key": "a"}, {"cache_salt": "a"}, {"extra_key": "a", "cache_salt": "b"}]
    sent = [
        completion(f"{length} ids of {model} with {more}", ids(4300 + length, length), model=model, **more)
        for length in LENGTHS
        for model in (f"tiny:{adapter}" for adapter in ADAPTERS)
        for more in variants
    ]
    tallies = _asked(hits, sent)
    assert not any(one.found for one in tallies[0].seen), "namespaces share blocks"
    return _all(tallies).text()


def _with_keys(seed: int) -> list[Prompt]:
    variants = [{"extra_key": "a"}, {"extra_key": "b"}, {"extra_key": "a", "cache_salt": "b"}]
    return [
        completion(f"{length} ids with {more}", ids(seed + length, length), **more) for length in LENGTHS for more in variants
    ]


def extra_keys_without_marks(hits: Hits) -> str:
    """SGLang's own format of events has no extra keys: their requests are not predicted, also not by plain prompts."""
    plain = [completion(f"{length} ids", ids(4600 + length, length)) for length in LENGTHS]
    tallies = _asked(hits, plain)
    with_keys = _all(_asked(hits, _with_keys(4600)))
    assert with_keys.false == 0, f"false hits: {with_keys.seen}"
    assert with_keys.missed > 0, "nothing was cached under extra keys"
    note = f"plain prompts: {_all(tallies).text()}; with extra keys: found {with_keys.missed}, predicted none"
    # The limit: blocks that only requests with an extra key have look as if plain prompts had them.
    _asked(hits, _with_keys(4900), 1)
    others = Tally([hits.ask(completion(f"{length} ids", ids(4900 + length, length)))[0] for length in LENGTHS])
    return f"{note}; plain prompts with blocks of extra keys: {others.false} of {sum(o.tokens for o in others.seen)} false"


def extra_keys_with_marks(hits: Hits) -> str:
    """The event format `dynamo`: prompts of extra keys, salts and without either are predicted exactly."""
    plain = [completion(f"{length} ids", ids(4600 + length, length)) for length in LENGTHS]
    tallies = [*_asked(hits, _with_keys(4600)), *_asked(hits, plain)]
    assert not any(one.found for one in [*tallies[0].seen, *tallies[2].seen]), "namespaces share blocks"
    return _all(tallies).text()


ADAPTER_CHECKS = [adapters_share_no_blocks, adapters_with_keys_and_salts]
