"""What if things had been otherwise: the smallest workload, the flip of a verdict, the best change.

All of it runs scenarios again and again in this process and compares what comes out:
``shrink`` takes requests away, ``flips`` moves one knob, ``whatif`` changes one thing at a time.
"""
