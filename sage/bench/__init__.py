"""Side-by-side measurement of policies and baselines; `sage-bench` is its command line.

runners = [PolicyRunner(target, draft, "sage"), *(baseline_runner(target, name) for name in ("autoregressive", "hf_generate"))]
report = build_report(measure(runners, prompts, Sampling()), target, "my draft", policies=["sage"])
"""
