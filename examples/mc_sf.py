"""MC-SF: shortest output first, if the KV cache suffices until every admitted request has ended.

Source: Jaillet et al., "Online Scheduling for LLM Inference with KV Cache Constraints", arXiv
2502.07115. The policy needs the output lengths; here they are the clients' ``max_tokens``.
"""

from simkv.custom import Batch, CustomConfig, CustomRequest, CustomScheduler, Held


class MemoryConstrainedShortestFirst(CustomScheduler):
    """Never preempts: a request is admitted only if no later step lacks KV blocks."""

    config: CustomConfig

    def decide(self, batch: Batch) -> None:
        for r in self.running:
            self.compute(batch, r, r.left)
        self.waiting.sort(key=lambda r: (r.prompt.max_tokens, r.prompt.arrival))
        while self.waiting:
            r = self.waiting[0]
            if len(self.running) == self.config.max_num_seqs or not self.suffices(r):
                batch.held = Held(r.id, "blocks")
                break
            self.compute(batch, r, r.left)

    def suffices(self, new: CustomRequest) -> bool:
        """Return whether the cache suffices at every end of a request if ``new`` starts now.

        Between two ends the demand only grows, so the ends are the steps to check. Requests that
        compute in this step have their tokens counted already; ``new`` has not.
        """
        steps_left = {r: r.prompt.max_tokens - r.emitted - 1 for r in self.running}
        steps_left[new] = new.prompt.max_tokens - new.emitted - 1
        computed = {r: r.computed for r in self.running} | {new: new.length}
        return all(
            sum(computed[r] + step for r, left in steps_left.items() if left >= step)
            <= self.config.num_blocks * self.config.block_size
            for step in set(steps_left.values())
        )
