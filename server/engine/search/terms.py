"""Beam search in which terms have to occur: Post & Vilar's dynamic beam allocation (arXiv 1804.06609).

A term is a list of alternatives, each a sequence of tokens. Hypotheses are in banks by the tokens that they miss at least, and the
slots are divided among banks, so that a term that is unlikely at its place stays in the search. A term is begun where its first
token has `LEAST_LOG_PROB`, or where the hypothesis would end without the term; a begun one can always be continued. Hypotheses that
end with terms missing are answers only where too few have all terms.

Tokens of terms are seldom among the likeliest. A runner has the log-probabilities of all tokens from the step itself; where it has
candidates alone, `NUM_CANDIDATES` are looked through, and the search waits for the whole vocabulary where a term has to go on.
"""

import math

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from dragoman.server.engine.messages import Request
from dragoman.server.engine.search.beam import BeamSearch
from dragoman.server.engine.search.constraints import MAX_LISTED, Option
from dragoman.server.engine.search.hypothesis import Hypothesis, Progress, TargetSide
from dragoman.server.engine.search.search import Search
from dragoman.server.runtime.runner import Candidates

# Candidates that a search looks through for tokens of terms.
NUM_CANDIDATES = 64
# Least log-probability of the first token of a term, but where a hypothesis ends: less likely ones change the rest of the text.
LEAST_LOG_PROB = -7.0
# Log-probability assumed of each missing token, where banks or hypotheses of different progress are compared.
MISSING_LOG_PROB = -4.0
# Steps after the likeliest hypothesis has ended without its terms, beside one for each missing token.
NUM_LATE_STEPS = 8

# Place in the order of extensions (cost, row, place in the row), the option, and the progress and missing tokens after it.
Entry = tuple[float, int, int, Option, Progress, int]


class Terms:
    """Alternatives of a request's terms as one automaton (Aho and Corasick's), whose nodes are the beginnings of alternatives."""

    def __init__(self, alternatives: list[list[list[int]]]) -> None:
        """Build the automaton in time linear in the tokens."""
        self._children: list[dict[int, int]] = [{}]
        self._through, self._ends = [0], [0]  # sets of terms with an alternative through a node, and with one that ends there
        self._least: list[dict[int, int]] = [{}]  # tokens still missing at least, by term
        for term, each in enumerate(alternatives):
            for ids in filter(None, each):
                self._add(term, ids)
        self.start = Progress(self._through[0])
        self._suffixes = [0] * len(self._children)  # node of the longest proper suffix that is a beginning
        order = list(self._children[0].values())
        for node in order:  # which grows
            for token, child in self._children[node].items():
                order.append(child)
                suffix = self._suffixes[node]
                while suffix and token not in self._children[suffix]:
                    suffix = self._suffixes[suffix]
                self._suffixes[child] = self._children[suffix].get(token, 0)
        self._following: dict[Progress, frozenset[int]] = {}
        self._num_missing: dict[Progress, int] = {}

    def _add(self, term: int, ids: list[int]) -> None:
        node = 0
        for place in range(len(ids) + 1):
            self._through[node] |= 1 << term
            self._least[node][term] = min(self._least[node].get(term, len(ids)), len(ids) - place)
            if place == len(ids):
                self._ends[node] |= 1 << term
            elif (child := self._children[node].get(ids[place])) is not None:
                node = child
            else:
                child = self._children[node][ids[place]] = len(self._children)
                self._children.append({})
                self._through.append(0)
                self._ends.append(0)
                self._least.append({})
                node = child

    def following(self, progress: Progress) -> frozenset[int]:
        """Return the tokens that continue an alternative of a missing term."""
        if (found := self._following.get(progress)) is None:
            children = self._children[progress.node].items()
            found = frozenset(token for token, child in children if self._through[child] & progress.missing)
            self._following[progress] = found
        return found

    def num_missing(self, progress: Progress) -> int:
        """Return the least number of tokens that are still missing."""
        if (found := self._num_missing.get(progress)) is None:
            whole, left = self._least[0], self._least[progress.node]
            terms = [term for term in whole if progress.missing >> term & 1]
            saved = max((whole[term] - left.get(term, whole[term]) for term in terms), default=0)
            found = self._num_missing[progress] = sum(whole[term] for term in terms) - saved
        return found

    def after(self, progress: Progress, token: int) -> Progress:
        """Return the progress after a token: the longest end of the tokens since the last term that begins an alternative."""
        missing, node = progress
        if not missing:
            return progress
        while not self._through[child := self._children[node].get(token, 0)] & missing or not child:
            if not node:
                return Progress(missing)
            node = self._suffixes[node]
        node = child
        while child:
            if ended := self._ends[child] & missing:
                return Progress(missing & ~(ended & -ended))
            child = self._suffixes[child]
        return Progress(missing, node)


class TermSearch(BeamSearch):
    """Beam search with terms; see the module."""

    def __init__(self, request: Request, target: TargetSide) -> None:
        self._terms = Terms(request.search.terms)
        progress = self._terms.start
        for token in request.search.forced_prefix:
            progress = self._terms.after(progress, token)
        self._after_prefix = progress
        self._ended: dict[int, float] = {}  # likely scores of hypotheses that were about to end, by their missing tokens
        self._max_steps = request.max_new_tokens
        # Of the live hypotheses in a step; None if the runner has only candidates, or the search was paused.
        self._all_log_probs: list[NDArray[np.float32]] | None = []
        self._is_whole = False  # whether no live hypothesis misses a term; none will then
        super().__init__(request, target)

    @property
    def is_unruled(self) -> bool:
        return self._is_whole and super().is_unruled

    @property
    def num_wanted(self) -> int:
        return super().num_wanted if self._is_whole else self.options.num_beams + 1

    def _set_num_candidates(self) -> None:
        self._is_whole = not any(self._progress(row).missing for row in range(len(self.live)))
        super()._set_num_candidates()
        if not self._is_whole and self._all_log_probs is None:
            self.num_candidates = min(max(self.num_candidates, NUM_CANDIDATES), self._target.num_choices)

    def _decide_all(self, candidates: Candidates) -> None:
        if self._is_whole:
            super()._decide_all(candidates)
        else:
            self._all_log_probs = candidates.all_log_probs
            Search._decide_all(self, candidates)
            if self.wanted:  # other steps overwrite them meanwhile
                self._all_log_probs = None

    def _decide(self, row: int, ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        super()._decide(row, ids, log_probs)
        progress = self._progress(row)
        if not progress.missing or (best := self._best.get(row)) is None:
            return
        following = self._terms.following(progress)
        wanted = following | self._terms.following(Progress(progress.missing))
        values = self._values(row, wanted, ids, log_probs)
        if len(ids) < self._target.num_choices and log_probs[-1] > -math.inf:
            likely = {token: value for token, value in values.items() if value >= LEAST_LOG_PROB}
            is_ending = bool(best) and best[0][0] == self._target.eos_id and self._is_ahead(row)
            is_lacking = likely.keys().isdisjoint(following) if progress.node else is_ending and not likely
            if is_lacking and is_ending:
                self._ended[self._terms.num_missing(progress)] = self._likely_score(self.live[row])
            if is_lacking and self._all_log_probs is None:
                del self._best[row]
                self._want_more(row, len(ids), is_far=True)
                return
            values = values if is_lacking else likely
        known = {token for token, _, _ in best}
        more = sorted((token, value) for token, value in values.items() if token not in known)
        if more and self._constraints.is_idle:
            self._best[row] = [*best, *((token, value, value) for token, value in more)]
        elif more:
            options = self._constraints.apply(self.live[row], *map(np.array, zip(*more, strict=True)))
            parts = (part.tolist() for part in (options.ids, options.log_probs, options.values))
            self._best[row] = [*best, *zip(*parts, strict=True)]

    def _values(self, row: int, wanted: frozenset[int], ids: NDArray[np.int64], log_probs: NDArray[np.float32]) -> dict[int, float]:
        """Return the log-probabilities of those wanted tokens that have any, as far as known."""
        if self._all_log_probs is not None:
            value_of = self._all_log_probs[row].item
            return {token: value for token in wanted if (value := value_of(token)) > -math.inf}
        if len(ids) <= MAX_LISTED:
            places = [place for place, token in enumerate(ids.tolist()) if token in wanted]
        else:
            places = np.flatnonzero(np.isin(ids, list(wanted))).tolist()
        return {ids.item(place): value for place in places if (value := log_probs.item(place)) > -math.inf}

    def _is_ahead(self, row: int) -> bool:
        """Return whether no hypothesis that misses as few tokens is likelier to win, nor was when it was about to end."""
        own, num_missing = self._likely_score(self.live[row]), self._terms.num_missing(self._progress(row))
        if own <= self._ended.get(num_missing, -math.inf):
            return False
        others = [*self.live[:row], *self.live[row + 1 :]]
        if self._finished and not self._finished[0].progress.missing:
            others.append(self._finished[0])
        return all(self._terms.num_missing(each.progress) > num_missing or self._likely_score(each) < own for each in others)

    def _progress(self, row: int) -> Progress:
        """Return the progress of a live hypothesis; the forced prefix is fed without."""
        hypothesis = self.live[row]
        return hypothesis.progress if hypothesis.num_generated else self._after_prefix

    def _choose(self, candidates: Candidates) -> list[int]:
        if self._is_whole:
            return super()._choose(candidates)
        width, eos_id = self.options.num_beams, self._target.eos_id
        live: list[Entry] = []
        finished: list[Hypothesis] = []
        num_whole = 0
        for rank, entry in enumerate(self._entries()):
            _, row, _, option, progress, num_missing = entry
            num_whole += not progress.missing
            if option[0] != eos_id:
                live.append(entry)
            elif (rank if progress.missing else num_whole - 1) < width:
                finished.append(self._extend(row, option, candidates, progress=progress))
                if progress.missing and rank == 0:
                    self._max_steps = min(self._max_steps, finished[-1].num_generated + num_missing + NUM_LATE_STEPS)
        self._keep_best(finished)
        chosen = self._allocate(live)
        hypotheses = [self._extend(row, option, candidates, progress=progress) for _, row, _, option, progress, _ in chosen]
        if not self._is_over(hypotheses):
            self.live = hypotheses
            return [entry[1] for entry in chosen]
        if not self._finished:  # the rules leave no extension
            self._keep_best([structs.replace(hypothesis, parent=row) for row, hypothesis in enumerate(self.live)])
        self.live = []
        return []

    def _entries(self) -> list[Entry]:
        """Return all extensions, best first."""
        entries: list[Entry] = []
        for row, best in self._best.items():
            total, progress = self.live[row].total, self._progress(row)
            away = Progress(progress.missing)
            start, num_missing = self._terms.following(away), self._terms.num_missing(away)
            for place, option in enumerate(best):
                token, after, num_after = option[0], away, num_missing
                if progress.node or token in start:
                    after = progress if token == self._target.eos_id else self._terms.after(progress, token)
                    num_after = self._terms.num_missing(after)
                entries.append((-(total + option[2]), row, place, option, after, num_after))
        entries.sort()
        return entries

    def _allocate(self, entries: list[Entry]) -> list[Entry]:
        """Return the extensions that stay live: an equal share of the slots for each bank, the rest for the best; in order.

        If there are more banks than slots, those of the best extensions have one each.
        """
        width = self.options.num_beams
        banks: dict[int, list[int]] = {}
        for place, entry in enumerate(entries):
            banks.setdefault(entry[5], []).append(place)
        if len(banks) > width:
            order = sorted(banks, key=lambda bank: (entries[banks[bank][0]][0] - bank * MISSING_LOG_PROB, bank))
            first = entries[0][5]  # of the best extension, which stays in any case
            kept = [first, *(bank for bank in order if bank != first)][:width]
            chosen = {banks[bank][0] for bank in kept}
        else:
            share = width // max(len(banks), 1)
            chosen = {place for places in banks.values() for place in places[:share]}
        for place in range(len(entries)):
            if len(chosen) >= width:
                break
            chosen.add(place)
        return [entries[place] for place in sorted(chosen)]

    def _is_over(self, live: list[Hypothesis]) -> bool:
        if not live:
            return True
        num_generated = live[0].num_generated
        if num_generated >= self._max_new_tokens:
            self._keep_best(live)
            return True
        if num_generated >= self._max_steps:
            return True
        answers = self._finished[: self.options.num_answers]
        if len(answers) < self.options.num_answers or answers[-1].progress.missing:
            return False
        worst = self._score(answers[-1])
        return self.options.is_stopped_early or all(self._likely_score(hypothesis) <= worst for hypothesis in live)

    def _likely_score(self, hypothesis: Hypothesis) -> float:
        """Return the score of a hypothesis with its missing tokens."""
        num_missing = self._terms.num_missing(hypothesis.progress)
        if not num_missing:
            return self._score(hypothesis)
        log_probs = [*hypothesis.log_probs, *[MISSING_LOG_PROB] * num_missing]
        total = hypothesis.total + num_missing * MISSING_LOG_PROB
        return self._score(structs.replace(hypothesis, log_probs=log_probs, total=total))

    def _keep_best(self, hypotheses: list[Hypothesis]) -> None:
        """Merge hypotheses into the best finished ones: those that miss fewer terms, then by score; earlier ones win ties."""
        merged = [*self._finished, *hypotheses]
        merged.sort(key=lambda hypothesis: (hypothesis.progress.missing.bit_count(), -self._score(hypothesis)))
        self._finished = merged[: self.options.num_beams]
