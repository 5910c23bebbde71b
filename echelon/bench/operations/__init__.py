"""One small file an operation; its vector form stands beside it. `BENCHMARKS` in each lists what it offers."""
