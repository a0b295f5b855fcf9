"""A proof on the user's own cluster: a training that is killed and requeued has the losses of one that is not."""
