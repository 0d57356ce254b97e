"""One sandbox backend, weight channel, store, tracker, advantage estimator and loss, as somebody outside of agentrl writes them."""
