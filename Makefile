# `make demo` runs the main job, `make test` passes the tests; both set up what they need.
