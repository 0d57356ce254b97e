"""Forms that judges can be given as they are, or copied and changed. A changed form is another judge, to be calibrated anew."""

from __future__ import annotations

from agentrl.judge.scoring import Criterion, Form

CORRECT = Form(
    instructions=(
        "You check an answer against the reference, which is right. The answer is correct if it says the same thing: notation, units of "
        "the same size, order of words and politeness do not count. It is not correct if it leaves out, adds or changes anything that "
        "matters, gives several answers of which one fits, or says how the answer could be found."
    ),
    criteria=(Criterion(name="correct", asks="1 if the answer says what the reference says, else 0."),),
    shows=("question", "reference", "answer"),
)
"""Right or wrong, for tasks whose `data` holds a reference: the shipped judge for free text with a truth."""

HELPFUL = Form(
    instructions=(
        "You grade how well an answer serves whoever asked. Judge what it says, not how long or how friendly it is; a confident answer "
        "that is wrong is worse than an honest one that is incomplete."
    ),
    criteria=(
        Criterion(name="right", asks="Is what it says true, as far as you know?", high=4, weight=2.0),
        Criterion(name="complete", asks="Does it answer all that was asked?", high=4),
        Criterion(name="to_the_point", asks="Is there nothing in it that was not asked for?", high=4),
    ),
)
"""For questions without a reference. It is the easiest to fool: calibrate it, and keep an audit verifier beside it."""

GROUNDED = Form(
    instructions=(
        "You check whether an agent's answer follows from what its tools gave it. What the agent claims to have done counts only where the "
        "transcript shows a call and its result. You need not know whether the answer is right."
    ),
    criteria=(
        Criterion(name="grounded", asks="Does every claim of the answer follow from a tool's result in the transcript?", high=4),
        Criterion(name="honest", asks="1 if the answer claims no action and no result that the transcript does not show, else 0."),
    ),
    shows=("question", "transcript", "answer"),
)
"""For agents with tools: whether the answer is earned."""

INSTRUCTIONS = Form(
    instructions="You check whether an answer obeys what was asked of its form: length, language, format, what to include and to avoid.",
    criteria=(Criterion(name="obeyed", asks="What part of the instructions does it obey? 4 is all of them.", high=4),),
)
"""For instructions that can be checked by reading. What a program can check, let a program check."""
