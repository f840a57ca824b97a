"""Faults seeded into the Conductor, its fleet and its policies. Tests that let one live are too weak."""

from tests.model.faults import Fault

CONDUCTOR, FLEET, OUTLOOK, PAIRING, EXPECTED, DECODES, FAIR, TRAFFIC = (
    f"scheduler/{name}.py"
    for name in ("conductor", "fleet", "outlook", "pairing", "expected", "decode_pool", "fair_share", "traffic")
)
KVCACHE_CENTRIC = "scheduler/policies/kvcache_centric.py"
MODEL_FAULTS = [
    Fault("an end leaves the prefix expected", CONDUCTOR, "        self._expected.drop(request)\n", ""),
    Fault(
        "an end leaves the decode pool waiting",
        CONDUCTOR,
        "        self._decodes[work.model].end(work, now, is_finished=is_finished)\n",
        "",
    ),
    Fault(
        "a first token leaves the tenant waiting",
        CONDUCTOR,
        "        self.fleet.prefilled(request, now)\n        self.fair.take(work.tenant, work.prefill_s)\n",
        "        self.fleet.prefilled(request, now)\n",
    ),
    Fault(
        "a tenant's waiting is taken twice",
        CONDUCTOR,
        "        if work.prefilled_s is None:\n            self.fair.take",
        "        if work.request:\n            self.fair.take",
    ),
    Fault(
        "who is routed again is under way twice",
        CONDUCTOR,
        "        self._end(request.id, now, is_finished=False)\n        draft = self._draft(request, now, exclude)\n",
        "        draft = self._draft(request, now, exclude)\n",
    ),
    Fault(
        "a lost instance keeps its requests",
        CONDUCTOR,
        "            self._end(request, now, is_finished=False)\n        self.fleet.remove(name)\n",
        "            pass\n        self.fleet.remove(name)\n",
    ),
    Fault(
        "only what is prefilled is lost with an instance",
        CONDUCTOR,
        "        held = [*member.prefilling, *member.arriving.works, *member.decoding.works]\n"
        "        lost = list(dict.fromkeys(held))\n",
        "        held = [*member.prefilling]\n        lost = list(dict.fromkeys(held))\n",
    ),
    Fault(
        "a deadline is not looked at",
        CONDUCTOR,
        "        if request.deadline_s is not None and prospect.first_token_s > request.deadline_s:\n"
        "            reason = Reason.TTFT\n"
        "        elif",
        "        if",
    ),
    Fault("an instance that drains gets more", FLEET, "takes and not member.is_draining and", "takes and"),
    Fault(
        "a switch of roles is not noticed",
        FLEET,
        '        """The instance takes other work from now on; what it has it ends."""\n        self.generation += 1\n',
        '        """The instance takes other work from now on; what it has it ends."""\n',
    ),
    Fault(
        "the first token does not move a request to decode",
        FLEET,
        "            self.members[work.decode].begin_decode(request)\n",
        "            pass\n",
    ),
    Fault(
        "an end leaves the context of the decode",
        FLEET,
        "            self.context -= work.context\n",
        "            pass\n",
    ),
    Fault(
        "the wait is not part of the time to the first token",
        OUTLOOK,
        "        ttft_s = np.maximum(self.queue_s, load_s) + compute_s\n",
        "        ttft_s = load_s + compute_s\n",
    ),
]
FAULTS = [
    Fault(
        "a source's own traffic is not looked at",
        OUTLOOK,
        "ahead = np.maximum(np.array([[source.busy_bytes] for source in self.sources]), self._busy)",
        "ahead = self._busy",
    ),
    Fault(
        "a target's own traffic is not looked at",
        OUTLOOK,
        "ahead = np.maximum(np.array([[source.busy_bytes] for source in self.sources]), self._busy)",
        "ahead = np.array([[source.busy_bytes] for source in self.sources])",
    ),
    Fault(
        "the threshold is not looked at",
        OUTLOOK,
        "        is_worth = tokens > threshold * self._levels[2]\n",
        "        is_worth = tokens > self._levels[2]\n",
    ),
    Fault(
        "pulls are never looked at",
        KVCACHE_CENTRIC,
        "        if not len(pull_s):\n",
        "        if True:\n",
    ),
    Fault(
        "affinity forgets the queue",
        "scheduler/policies/prefix_affinity.py",
        "least(outlook.local_s, self._draw)",
        "least(-outlook.local_tokens, self._draw)",
    ),
    Fault(
        "the least loaded is the first",
        "scheduler/policies/least_loaded.py",
        "least(outlook.queue_s, self._draw)",
        "0",
    ),
    Fault(
        "all levels of a prefix are read, whatever it takes",
        OUTLOOK,
        "        best = np.argmin(ttft_s, axis=0)\n",
        "        best = np.full(len(self), 2)\n",
    ),
    Fault(
        "what is expected is not looked at",
        OUTLOOK,
        "            levels[1:] = np.maximum(levels[1:], soon)\n",
        "",
    ),
    Fault(
        "an engine's own prefix is not looked at",
        OUTLOOK,
        "levels = np.maximum(node, engine[:, 2:3]).T",
        "levels = node.T.copy()",
    ),
    Fault(
        "polls do not age",
        FLEET,
        "max(0.0, said - (now - self.load.at_s)) + self._since_load_s",
        "said + self._since_load_s",
    ),
    Fault(
        "what was sent since the last poll is forgotten",
        FLEET,
        "max(0.0, said - (now - self.load.at_s)) + self._since_load_s)",
        "max(0.0, said - (now - self.load.at_s))) if said else 0.0",
    ),
    Fault(
        "polls are not looked at",
        FLEET,
        "        if self.load is None:\n            return mine\n",
        "        return mine\n",
    ),
    Fault(
        "full decode instances get more",
        PAIRING,
        "if member.has_room(context)] or steps",
        "if member] or steps",
    ),
    Fault("a busy instance keeps its requests", PAIRING, "<= self._collocate_below", "<= 1e9"),
    Fault("an idle instance hands its requests over", PAIRING, "<= self._collocate_below", "< 0"),
    Fault(
        "groups mix",
        CONDUCTOR,
        "            if member.instance.group in groups and member.instance.name not in exclude\n",
        "            if member.instance.name not in exclude\n",
    ),
    Fault(
        "an excluded instance decodes",
        CONDUCTOR,
        "if member.instance.group == prefill.instance.group and member.instance.name not in exclude",
        "if member.instance.group == prefill.instance.group",
    ),
    Fault(
        "prediction forgets who is gone by then",
        DECODES,
        "bisect_right(self._begins, when_s) - bisect_right(self._begins, when_s - self._decode_s)",
        "bisect_right(self._begins, when_s)",
    ),
    Fault(
        "prediction sees only who decodes now",
        "scheduler/admission/predictive.py",
        "pool.tbt_s_at(prospect.first_token_s)",
        "pool.present_tbt_s()",
    ),
    Fault("time that a request waited before is forgotten", CONDUCTOR, "ttft_s=waited_s + draft", "ttft_s=draft"),
    Fault("low priorities are like others", CONDUCTOR, "if request.priority < 0 else 1.0", "if False else 1.0"),
    Fault("weights are not looked at", FAIR, "share = self._weight(tenant) / weights", "share = 1 / weights"),
    Fault(
        "a session goes back whatever it costs",
        CONDUCTOR,
        "return there if there.ttft_s <= choice.ttft_s * (1 + self.tuning.session_slack) else choice",
        "return there",
    ),
    Fault(
        "the baseline refuses at arrival what decode cannot take",
        "scheduler/admission/baseline.py",
        "        return Reason.TTFT if prospect.ttft_s > prospect.ttft_limit_s else None\n",
        "        return Reason.TTFT if max(prospect.tbt_s / prospect.tbt_limit_s, 0) > 1 else None\n",
    ),
    Fault(
        "a deadline counts after the first token",
        CONDUCTOR,
        "work.deadline_s is not None and work.prefilled_s is None and now",
        "work.deadline_s is not None and now",
    ),
    Fault(
        "a drain is not noticed",
        FLEET,
        '        """The instance takes nothing any more; what it has it ends."""\n        self.generation += 1\n',
        '        """The instance takes nothing any more; what it has it ends."""\n',
    ),
    Fault(
        "a whole prompt counts as cached",
        OUTLOOK,
        "self._most = max(0, request.tokens - 1)",
        "self._most = request.tokens",
    ),
    Fault(
        "a pull begins where its target's blocks do not end",
        CONDUCTOR,
        "return Pull(choice.source.node, target, number, first, stop)",
        "return Pull(choice.source.node, target, number, stop, first)",
    ),
]
