"""Saves on notice inside other frameworks: a framework saves its own checkpoint, at a step that all ranks agree on.

    from stepkeeper_trainer.integrations.huggingface import StepkeeperCallback
    trainer.add_callback(StepkeeperCallback(trainer))

    from stepkeeper_trainer.integrations.lightning import StepkeeperCallback
    trainer = lightning.Trainer(callbacks=[StepkeeperCallback()])

`stepkeeper run --attach auto` does the same for a script that nobody changes: `site/sitecustomize.py` is imported at
the start of each Python of the training, and `hook.py` attaches when a framework is imported.  `attachment.py` is what
they have in common; each framework is one file, and one line of `hook.MODULES`.
"""
