"""Mutants of refusals and of sentences: a mistake that is no longer seen, or is seen too late.
`run.py` runs them."""

SANDBOX = "rewards/test_rewards_sandbox.py"
ESCAPES = "rewards/test_sandbox_escapes.py"
FORGED = f"{SANDBOX}::test_a_result_that_is_no_answer_passes_no_test"
OPTIONS, SETTINGS = "settings/test_options.py", "settings/test_settings.py"
ENVIRONMENT = "language/test_environment_run.py"
TURNS = "language/test_turn_rewards.py"
COLUMNS, FOLDERS = "run/test_unread_columns.py", "run/test_atomic.py"

# fmt: off
ROWS = (
    ("verdict-word", "rewards/sandbox/run.py", 'if line not in (f"{word} {verdict}".encode() for verdict in (0, 1)):',
     'if not line.endswith((b" 0", b" 1")):', SANDBOX),
    ("verdict-random", "rewards/sandbox/run.py", "word = secrets.token_hex(16)", 'word = "0" * 32',
     f"{SANDBOX}::test_code_that_came_to_run_beside_the_judge_writes_no_verdict"),
    ("verdict-rest", "rewards/sandbox/run.py", '                break\n            reason = line.endswith(b" 1")',
     '                continue\n            reason = line.endswith(b" 1")',
     f"{SANDBOX}::test_verdicts_end_with_the_first_line_of_another_form"),
    ("keeper-kills", "rewards/sandbox/keeper.py", "        os.kill(child, signal.SIGKILL)", "        os._exit(1)", ESCAPES),
    ("keeper-waits", "rewards/sandbox/run.py", "            keeper.wait()\n", "            process.kill()\n", ESCAPES),
    ("keeper-group", "rewards/sandbox/confine.py", "    os.setsid()  #", "    pass  #",
     f"{ESCAPES}::test_a_signal_to_its_own_group_reaches_no_process_of_ours_outside"),
    ("timers", "rewards/sandbox/confine.py", "        limits[resource.RLIMIT_SIGPENDING] = MOST_PENDING\n", "", ESCAPES),
    ("judge-pickles", "rewards/sandbox/judge.py", "    sys.addaudithook(_refuse_pickles)\n", "", FORGED),
    ("judge-eval", "rewards/sandbox/judge.py", '{"eval": self._evaluated, "exec": _refuse_code}',
     '{"exec": _refuse_code}', FORGED),
    ("judge-exec", "rewards/sandbox/judge.py", '"exec": _refuse_code}', "}", FORGED),
    ("judge-makes", "rewards/sandbox/remote.py", "makes and name[:1].isupper()", "name[:1].isupper()", FORGED),
    ("number-switch", "flowrl/settings/base.py", "if isinstance(value, bool) and field is not None:", "if False:",
     SETTINGS),
    ("environment-exit", "flowrl/models/language/environment.py", "except (Exception, SystemExit) as error:",
     "except Exception as error:", f"{ENVIRONMENT}::test_an_environment_that_fails_is_one_sentence"),
    ("environment-async", "flowrl/models/language/environment.py", "return completed(self.by.function(", "return (self.by.function(",
     f"{ENVIRONMENT}::test_an_asynchronous_environment_replies_as_another"),
    ("turns-source", "flowrl/settings/model/environment.py", "if not algorithm.by_turn and", "if False and", TURNS),
    ("turns-base", "flowrl/run/evaluate/trial.py", "if isinstance(points, TurnPoints) and not by_turn and", "if False and", TURNS),
    ("own-async", "rewards/user_function.py", "    if inspect.isasyncgenfunction(function):", "    if False:",
     "rewards/test_user_functions.py"),
    ("table-headless", "flowrl/prompts/source.py", "any(map(_is_number, names))", "False", "prompts/test_data_sets.py"),
    ("seeds-interval", "scripts/benchmarks/experiment.py", "student.ppf(0.975, len(values) - 1)", "1.96",
     "scripts/test_experiment.py"),
    ("option-twice", "flowrl/settings/command_line/options.py", "            entry = option.again(before[option.path], entry, name)\n",
     "            pass\n", OPTIONS),
    ("option-list", "flowrl/settings/command_line/options.py", "            return [*before, *words]\n", "            return [*words]\n", OPTIONS),
    ("option-recipe", "flowrl/settings/read.py", "    if _NAME in rest[:-1]:", "    if False:", OPTIONS),
    ("option-folder", "flowrl/cli/restarts.py", "            if key in values:\n", "            if False:\n",
     "cli/test_command_line.py::test_a_mistake_is_one_sentence"),
    ("union-form", "flowrl/settings/words/sentences.py", "or errors_of_form[:1]", "+ errors_of_form[:1]", SETTINGS),
    ("union-empty", "flowrl/settings/words/sentences.py", 'if e["type"] != "too_short" or', "if True or", SETTINGS),
    ("ray-last", "flowrl/settings/checks/machine.py", "    w = run.workers\n    if w.sampling == 0 and w.gpus:",
     "    w = run.workers\n    if w.any and find_spec(\"ray\") is None:\n        raise UserError(\"workers: no Ray\")\n    if w.sampling == 0 and w.gpus:",
     f"{SETTINGS}::test_a_missing_ray_hides_no_other_mistake"),
    ("file-ending", "flowrl/paths.py", "if other is not None and", "if False and",
     "test_anywhere.py::test_the_other_ending_of_a_file_is_offered"),
    ("columns-read", "flowrl/run/evaluate/start_checks.py", 'if name not in (*columns, "prompt")', "if True", COLUMNS),
    ("columns-vision", "flowrl/run/evaluate/start_checks.py",
     "if policy.vision is not None:", "if True:", COLUMNS),
    ("folder-kind", "flowrl/session/atomic.py", 'path.is_dir() == (wanted == "file")', "False", FOLDERS),
    ("checkpoints-gone", "flowrl/run/save/checkpoint.py", "    _refuse_lost(folder)\n    return None", "    return None",
     "run/test_interruptions.py::test_a_run_whose_checkpoints_are_gone_is_refused_and_loses_nothing"),
    ("checkpoints-begun", "flowrl/run/save/checkpoint.py", 'if iterations > 0 and not any((folder / "checkpoints").glob(".*.tmp")):',
     "if iterations > 0:", "run/test_interruptions.py::test_a_run_whose_checkpoints_are_gone_is_refused_and_loses_nothing"),
    ("meeting-lost", "flowrl/processes/meeting.py", "        if not lost(error):\n            raise\n", "        raise\n",
     "processes/test_meeting.py"),
    ("held-out-sets", "flowrl/session/session.py", "if columns.get(DATA_SET) in self.sets]", "if columns]",
     "run/test_held_out_sets.py::test_a_reward_of_sets_scores_their_rows_alone"),
    ("tracker-waits", "flowrl/run/show/mirror.py", "self._calls.put_nowait((name, do))", "self._calls.put((name, do))",
     "run/test_trackers.py::test_a_tracker_that_is_slower_than_the_run_loses_records"),
)
# fmt: on
