"""Checks of SGLang's hybrid models: its events do not say where a prefix can be reused, so that predictions may miss a few hits, but
none is false."""

from __future__ import annotations

from hits import HIT_CHECKS, Hits, Seen, Tally, check_late
from prompts import chat, completion, ids, prompts, text


def _note(tally: Tally) -> str:
    note = tally.text()
    assert tally.false == 0, note
    return note


def mixed_prompts_without_false_hits(hits: Hits) -> str:
    return _note(Tally([hits.ask(prompt)[0] for prompt in prompts()]))


def branches_without_false_hits(hits: Hits) -> str:
    """Prompts that branch off in the middle of others, and return while others push their blocks out."""
    system = ids(7000, 900)
    branches = [completion(f"branch {n}", system + ids(7001 + n, 40 * n + 5)) for n in range(8)]
    kept = [completion(f"{length} ids", ids(7100 + length, length)) for length in (300, 700, 1500)]
    longer = [completion(f"{length} more ids", ids(7100 + length, length) + ids(1, 90)) for length in (300, 700)]
    tally = Tally([hits.ask(prompt)[0] for _ in range(2) for prompt in branches])
    for turn in range(4):
        others = [completion(f"other ids {turn}", ids(7200 + 10 * turn + n, 1400)) for n in range(2)]
        tally.seen += [hits.ask(prompt)[0] for prompt in [*kept, *others, *longer, *reversed(kept)]]
    return _note(tally)


def growing_chats_without_false_hits(hits: Hits) -> str:
    tally = Tally()
    chats = [[{"role": "system", "content": text(150 + i, 60 * i)}] for i in range(3)]
    for turn in range(5):
        for number, messages in enumerate(chats):
            messages.append({"role": "user", "content": text(300 + 100 * turn + number, 20 + 30 * turn)})
            seen, answer = hits.ask(chat(f"chat {number}, turn {turn}", messages, max_tokens=40))
            tally.seen.append(seen)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return _note(tally)


def repeats_after_responses(hits: Hits) -> str:
    """Prompts of whole pages and others, new ones and such that branch off where no window is left, are sent again after responses of many
    lengths: how much SGLang keeps of them depends on it."""
    whole = ids(7300, 1600)
    tally = Tally([hits.ask(completion("1600 ids", whole))[0]])
    for turn, tokens in enumerate((2, 64, 130, 200, 300)):
        own = ids(7310 + turn, 600)
        cuts = [1430 - 90 * (3 * turn + branch) for branch in range(3)]
        branches = [whole[:cut] + own[:length] for cut, length in zip(cuts, (12, 160 - cuts[1] % 32, 331))]
        for prompt in [own[: 320 + 32 * turn], *branches]:
            bodies = [(prompt, tokens), (prompt, 2), (prompt + own[400:440], 2)]
            asked = [completion(f"{len(p)} ids, {n} new", p, max_tokens=n, ignore_eos=True) for p, n in bodies]
            tally.seen += [hits.ask(one)[0] for one in asked]
    return _note(tally)


# Share of the cached tokens that a gateway expects without having seen the requests.
LATE = 0.8


def a_late_gateway_without_false_hits(hits: Hits) -> str:
    """A gateway that starts now has seen no request: it may miss what follows from the lengths of prompts and responses, and expects
    nothing that the first one does not."""
    def expected(admin: str) -> list[Seen]:
        return [hits.predict(prompt, admin) for prompt in prompts()]

    def enough(late: list[Seen], wanted: list[Seen]) -> bool:
        never_more = all(ours.predicted <= theirs.predicted for ours, theirs in zip(late, wanted))
        return never_more and sum(one.predicted for one in late) >= LATE * sum(one.predicted for one in wanted)

    return check_late(hits, expected, enough)


(_LATE,) = [check for check in HIT_CHECKS if check.__name__ == "a_late_gateway"]
RECURRENT_CHECKS = [
    mixed_prompts_without_false_hits,
    _LATE,
    branches_without_false_hits,
    growing_chats_without_false_hits,
]
SLIDING_CHECKS = [
    mixed_prompts_without_false_hits,
    a_late_gateway_without_false_hits,
    branches_without_false_hits,
    growing_chats_without_false_hits,
    repeats_after_responses,
]
