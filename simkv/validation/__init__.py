"""One judge: simulations against what really happened.

    compared.py  a figure of a run beside what simulations make of it, and tables of them
    cases/       what others recorded: times by request of an engine that cannot be run here
    served/      what simkv's own GPU runner left: every step and decision, judged at three levels

Nothing here needs torch; lab/ serves what is judged.
"""
