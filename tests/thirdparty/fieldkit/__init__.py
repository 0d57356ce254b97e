"""One sandbox backend, weight channel, store, tracker, advantage estimator and loss, as a third-party package implements them."""
