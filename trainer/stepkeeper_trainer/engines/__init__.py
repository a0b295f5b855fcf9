"""`CheckpointManager` in the place of a framework's own saves: verified, asynchronous, with its own step directories.

    from stepkeeper_trainer.engines.huggingface import save_with_stepkeeper
    save_with_stepkeeper(trainer)

    from stepkeeper_trainer.engines.lightning import StepkeeperCheckpoints
    trainer = lightning.Trainer(callbacks=[StepkeeperCheckpoints()])

    from stepkeeper_trainer.engines.torchtitan import StepkeeperCheckpointManager
    config.checkpoint = StepkeeperCheckpointManager.Config(enable=True)

`training.py` is what they have in common; each framework is one file.  Agreement, notices, progress and the end of the
work are the manager's own.  `stepkeeper_trainer.integrations` leaves the saving to the framework instead.
"""
