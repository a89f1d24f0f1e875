"""Drafters that read the text itself: prompt lookup and the suffix automaton, against brute force."""

import random
import time
from collections import Counter

import pytest

from slipstream.core.errors import InputError
from slipstream.core.params import SamplingParams
from slipstream.core.tree import ANCHOR, Draft
from slipstream.core.types import Limit, Row
from slipstream.drafters.lookup import Lookup
from slipstream.drafters.suffix import Suffix
from slipstream.kernels import native
from slipstream.kernels.reference_suffix import NONE, ROOT, SuffixAutomaton, predict
from slipstream.kernels.suffix import make_automaton


def row_of(tokens, ident=0):
    return Row(ident, list(tokens), len(tokens), SamplingParams(), 0, sampler=None)


def offer(drafter, tokens, limit):
    row = row_of(tokens)
    drafter.begin(row)
    made = drafter.propose([row], [limit])[0]
    drafter.end(row)
    Draft(made.tokens, made.parents).check(100_000)
    assert len(made.probs) == len(made.features) == len(made)
    assert all(0 <= prob <= 1 for prob in made.probs)
    return made


def chain(n):
    return Limit(n, n)


@pytest.mark.parametrize(
    ("tokens", "k", "drafted"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 1, [4]),
        ([1, 2, 3, 4, 1, 2, 3], 0, []),
        ([], 3, []),
        ([5], 3, []),
        ([5, 6], 3, []),
        ([5, 6, 7], 3, []),
        ([5, 5], 2, [5, 5]),  # the match at the very end overlaps itself
        ([7, 7, 7, 7], 3, [7, 7, 7]),
        ([1, 2, 1, 2, 1], 4, [2, 1, 2, 1]),  # overlapping: goes on in its own period
        ([3, 1, 2, 9, 1, 2, 8, 5, 1, 2], 2, [8, 5]),  # the latest of two places
        ([1, 2, 3, 8, 9, 3, 7, 1, 2, 3], 2, [8, 9]),  # the longest match before the latest
    ],
)
@pytest.mark.parametrize("kind", [Lookup, Suffix])
def test_fault_21_ngram_edges(kind, tokens, k, drafted):
    assert offer(kind(), tokens, chain(k)).tokens == drafted


def brute_lookup(tokens, k, max_n, min_n):
    """Every place is looked at."""
    for n in range(max_n, min_n - 1, -1):
        if n >= len(tokens):
            continue
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                text = list(tokens)
                for step in range(k):
                    text.append(text[end + step])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize(("max_n", "min_n"), [(3, 1), (1, 1), (5, 2), (2, 2)])
def test_lookup_equals_brute_force_while_the_text_grows(max_n, min_n):
    rng = random.Random(max_n)
    for case in range(30):
        tokens = [rng.randrange(1 + case % 4) for _ in range(rng.randrange(5))]
        drafter, row = Lookup(max_n, min_n), row_of(tokens)
        drafter.begin(row)
        for _ in range(25):
            made = drafter.propose([row], [chain(6)])[0]
            assert made.tokens == brute_lookup(row.tokens, 6, max_n, min_n)
            row.tokens += [rng.randrange(1 + case % 4) for _ in range(rng.randrange(1, 4))]


def test_lookup_refuses_impossible_lengths():
    with pytest.raises(InputError, match="0 to 3"):
        Lookup(3, 0)
    with pytest.raises(InputError, match="3 to 2"):
        Lookup(2, 3)


def occurrences(text, part):
    ends = [i for i in range(len(part), len(text) + 1) if text[i - len(part) : i] == part]
    return len(ends), max(ends, default=0)


def walk(automaton, part):
    state = ROOT
    for token in part:
        state = automaton.step(state, token)
        if state == NONE:
            return NONE
    return state


def automaton_faults(text):
    """What an automaton gets wrong about every substring of `text` and about its longest repeated suffix."""
    automaton, faults = SuffixAutomaton(), []
    automaton.extend(text[:1])
    list(automaton.continuations(ROOT))
    automaton.extend(text[1:])
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            part = text[start:end]
            state = walk(automaton, part)
            if state == NONE:
                faults.append(f"{part} is missing")
            elif (automaton.count[state], automaton.latest[state]) != occurrences(text, part):
                faults.append(f"{part} is counted wrong")
            else:
                after = Counter(text[i] for i in range(len(text)) if text[max(0, i - len(part)) : i] == part)
                seen = {token: automaton.count[next_] for token, next_ in automaton.continuations(state)}
                if seen != after or automaton.followers(state) != after.total():
                    faults.append(f"{part} is continued wrong")
    longest = max(n for n in range(len(text)) if occurrences(text, text[len(text) - n :])[0] > 1 or n == 0)
    if automaton.length[automaton.match()] != longest:
        faults.append("the longest match is wrong")
    return faults


def random_texts(count):
    for seed in range(count):
        rng = random.Random(seed)
        yield [rng.randrange(1 + seed % 4) for _ in range(3 + rng.randrange(25))]


TEXTS = [*random_texts(60), [1, 2, 3] * 8, [0] * 30, list(range(20))]


def test_automaton_equals_brute_force():
    for text in TEXTS:
        assert automaton_faults(text) == []


def test_planted_wrong_counts_are_seen(monkeypatch):
    def one_too_few(self, added, before, token):
        self.count[added] += 1
        self.latest[added] = self.size

    monkeypatch.setattr(SuffixAutomaton, "_recount", one_too_few)
    assert any(automaton_faults(text) for text in TEXTS)


def test_planted_shared_split_is_seen(monkeypatch):
    monkeypatch.setattr(SuffixAutomaton, "_split", lambda self, state, token, found: found)
    assert any(automaton_faults(text) for text in TEXTS)


def test_wide_states_keep_the_most_frequent_continuations():
    rng = random.Random(3)
    automaton, text = SuffixAutomaton(), []
    for size in range(1, 1500):
        token = 0 if size % 2 else 1 + min(int(rng.paretovariate(0.7)), 60)
        text.append(token)
        automaton.extend([token])
        if size % 50 == 0 and size > 400:
            state = automaton.step(ROOT, 0)
            after = {}
            for index in range(1, len(text)):
                if text[index - 1] == 0:
                    seen = after.get(text[index], (0, 0))[0]
                    after[text[index]] = (seen + 1, index + 1)
            best = sorted(after, key=lambda t: after[t], reverse=True)[:8]
            assert sorted(token for token, _ in automaton.continuations(state)) == sorted(best)


def test_incremental_and_at_once_are_the_same():
    text = list(map(random.Random(5).randrange, [3] * 200))
    one, many = SuffixAutomaton(), SuffixAutomaton()
    one.extend(text)
    for token in text:
        many.extend([token])
    assert one.link == many.link
    assert one.count == many.count


def test_suffix_prefers_frequent_then_recent_continuations():
    text = [1, 2, 9, 3, 1, 2, 8, 4, 1, 2, 9, 5, 1, 2]
    assert offer(Suffix(), text, Limit(2, 1, 2)).tokens == [9, 8]
    tied = [1, 2, 9, 5, 1, 2, 8, 6, 1, 2]
    assert offer(Suffix(), tied, Limit(2, 1, 2)).tokens == [8, 9]


def test_suffix_tree_stays_within_its_limit_and_is_ranked():
    rng = random.Random(1)
    for case in range(40):
        text = [rng.randrange(2 + case % 5) for _ in range(120)]
        limit = Limit(rng.randrange(1, 20), rng.randrange(1, 6), rng.randrange(1, 4))
        made = offer(Suffix(), text, limit)
        draft = Draft(made.tokens, made.parents)
        assert 0 < len(made) <= limit.nodes
        assert max(draft.depths()) <= limit.depth
        for parent in range(ANCHOR, len(made)):
            children = draft.children(parent)
            assert len(children) <= limit.width
            assert sum(made.probs[child] for child in children) <= 1 + 1e-9
        reach = []
        for parent, prob in zip(made.parents, made.probs, strict=True):
            reach.append(prob * (reach[parent] if parent != ANCHOR else 1.0))
        assert reach == sorted(reach, reverse=True)


def test_suffix_chance_grows_with_match_length():
    def first(match):
        text = [*range(20, 20 + match), 5, *range(60, 70), *range(20, 20 + match)]
        return offer(Suffix(), text, chain(1)).probs[0]

    chances = [first(match) for match in (1, 2, 4, 8, 16)]
    assert chances == sorted(chances)
    assert chances[0] < 0.35
    assert chances[-1] > 0.8


def test_predict_shares_sum_to_at_most_one():
    rng = random.Random(2)
    automaton = SuffixAutomaton()
    for _ in range(300):
        automaton.extend([rng.randrange(3)])
        guesses = predict(automaton, automaton.match(), automaton.length[automaton.match()], 50)
        assert sum(guess[0] for guess in guesses) <= 1 + 1e-9


@pytest.mark.parametrize("kind", [Lookup, Suffix])
def test_fault_22_rows_do_not_see_each_other(kind):
    drafter = kind()
    copy, fresh = row_of([1, 2, 3, 4, 1, 2], 1), row_of([1, 2, 7], 2)
    drafter.begin(copy)
    drafter.begin(fresh)
    both = drafter.propose([copy, fresh], [chain(3)] * 2)
    assert [made.tokens for made in both] == [[3, 4, 1], []]
    drafter.end(copy)
    again = row_of([1, 2, 7], 1)  # the same id, another request
    drafter.begin(again)
    assert drafter.propose([again], [chain(3)])[0].tokens == []


def zipf_text(size, seed=0):
    """Skewed tokens with copied phrases, like prose that quotes itself."""
    rng, text = random.Random(seed), []
    while len(text) < size:
        if len(text) > 200 and rng.random() < 0.1:
            start = rng.randrange(len(text) - 50)
            text += text[start : start + rng.randrange(5, 50)]
        else:
            text.append(min(int(rng.paretovariate(0.8)), 30_000))
    return text[:size]


@pytest.mark.parametrize("kind", [Lookup, Suffix])
@pytest.mark.parametrize(
    "text", [zipf_text(100_000), [1] * 100_000, [1, 2, 3, 4, 5] * 20_000], ids=["prose", "constant", "period"]
)
def test_cost_per_token_does_not_grow_with_the_context(kind, text):
    drafter, row = kind(), row_of(text[:2000])
    drafter.begin(row)
    drafter.propose([row], [chain(8)])

    def per_step():
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(40):
                row.tokens += text[len(row.tokens) : len(row.tokens) + 3]
                drafter.propose([row], [Limit(8, 8, 1)])
            best = min(best, (time.perf_counter() - started) / 40)
        return best

    early = per_step()
    row.tokens = list(text[:99_000])
    drafter.propose([row], [chain(8)])
    late = per_step()
    assert late < 4 * early + 2e-4, f"{early * 1e6:.0f} us grew to {late * 1e6:.0f} us"


@pytest.mark.skipif(native.core is None, reason="installed without the compiled core")
@pytest.mark.parametrize("alphabet", [1, 2, 4, 40, 400])
def test_the_compiled_automaton_equals_its_twin(alphabet):
    rng = random.Random(alphabet)
    compiled, twin = make_automaton(), SuffixAutomaton()
    assert type(compiled) is not SuffixAutomaton
    text = [rng.randrange(alphabet) for _ in range(600)]
    text += text[100:300] + [rng.randrange(alphabet) if rng.random() < 0.1 else token for token in text[:400]]
    size = 0
    while size < len(text):
        more = rng.randrange(1, 6)
        for one in (compiled, twin):
            one.extend(text[size : size + more])
        size += more
        limits = (rng.randrange(1, 20), rng.randrange(1, 9), rng.randrange(1, 5), rng.choice([0.0, 0.03, 0.2]))
        assert list(map(list, compiled.tree(*limits))) == list(map(list, twin.tree(*limits)))
        assert compiled.size == twin.size
