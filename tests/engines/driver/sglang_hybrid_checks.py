"""Checks of SGLang's hybrid models: its events do not say where a prefix can be reused, so that predictions may miss hits, but none
is false."""

from __future__ import annotations

from apis import BLOCK
from hits import HIT_CHECKS, RIGHT, Hits, Tally
from prompts import chat, completion, ids, prompts, text


def _note(tally: Tally) -> str:
    """A prompt of whole pages that is sent again must be computed from its last page on, and that the window before that page is
    still there cannot be seen in events: such prompts may be missed."""
    tokens, found = sum(one.tokens for one in tally.seen), sum(one.found for one in tally.seen)
    same = sum(one.predicted == one.found for one in tally.seen)
    whole = Tally([one for one in tally.seen if one.tokens % BLOCK == 0])
    note = f"{same} of {len(tally.seen)} prompts exact; {tokens} tokens, found {found}, missed {tally.missed}"
    note += f" ({whole.missed} of prompts of whole pages), false {tally.false}"
    wrong = "".join(f"\n    {one}" for one in tally.seen if one.predicted != one.found)
    missed = tally.missed - whole.missed
    assert tally.false == 0 and missed <= (1 - RIGHT) * tokens, note + wrong
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


(_LATE,) = [check for check in HIT_CHECKS if check.__name__ == "a_late_gateway"]
HYBRID_CHECKS = [
    mixed_prompts_without_false_hits,
    _LATE,
    branches_without_false_hits,
    growing_chats_without_false_hits,
]
