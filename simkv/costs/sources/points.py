"""Attention tables from measurements of prefills and of decodes by themselves."""

from __future__ import annotations

import pandas as pd

from simkv.costs.attention import AttentionRow, AttentionSlice, AttentionTable


def table_of(prefills: pd.DataFrame, decodes: pd.DataFrame) -> AttentionTable:
    """A table from columns ``tokens``, ``before``, ``seconds`` and ``seqs``, ``context``,
    ``seconds``; of several measurements of one point the median counts."""
    slices = []
    for _, part in prefills.groupby("tokens"):
        at = part.groupby("before")["seconds"].median()
        rows = [
            AttentionRow(prefill_context=int(before), decode_context=[0], seconds=[float(seconds)])
            for before, seconds in zip(at.index.tolist(), at.tolist(), strict=True)
        ]
        tokens = int(part["tokens"].iloc[0])
        slices.append(AttentionSlice(prefill_tokens=tokens, decode_seqs=0, rows=rows))
    for _, part in decodes.groupby("seqs"):
        at = part.groupby("context")["seconds"].median()
        contexts = [int(context) for context in at.index.tolist()]
        row = AttentionRow(prefill_context=0, decode_context=contexts, seconds=at.tolist())
        seqs = int(part["seqs"].iloc[0])
        slices.append(AttentionSlice(prefill_tokens=0, decode_seqs=seqs, rows=[row]))
    return AttentionTable(slices=slices)
