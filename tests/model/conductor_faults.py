"""Faults seeded into the Conductor, its fleet and its policies. Tests that let one live are too weak."""

from tests.model.faults import Fault

CONDUCTOR, FLEET, OUTLOOK, PAIRING, EXPECTED, POOLS, FAIR, TRAFFIC = (
    f"scheduler/{name}.py"
    for name in (
        "conductor",
        "fleet",
        "outlook",
        "pairing",
        "expected",
        "pools",
        "fair_share",
        "traffic",
    )
)
KVCACHE_CENTRIC = "scheduler/policies/kvcache_centric.py"
MODEL_FAULTS = [
    Fault("an end leaves the prefix expected", CONDUCTOR, "        self._expected.drop(request)\n", ""),
    Fault(
        "a first token leaves the tenant waiting",
        CONDUCTOR,
        "        self.fleet.prefilled(request, now)\n        self.fair.take(work.model, work.tenant, work.prefill_s)\n",
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
        "        if request.deadline_s is not None and first_token_s > request.deadline_s:\n"
        "            reason = Reason.TTFT\n"
        "            late_s = max(late_s, first_token_s - request.deadline_s)\n"
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
        "ahead = np.maximum(busy, self._busy)",
        "ahead = self._busy",
    ),
    Fault(
        "a target's own traffic is not looked at",
        OUTLOOK,
        "ahead = np.maximum(busy, self._busy)",
        "ahead = busy",
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
        "least(outlook.local_cost_s(self._weight), self._draw)",
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
        "return max(0.0, self._told_s - (now - self._told_at_s))",
        "return self._told_s",
    ),
    Fault(
        "what was sent since the last poll is forgotten",
        FLEET,
        "        self._told_s, self._told_at_s = self._told(now) + work.prefill_s, now\n",
        "",
    ),
    Fault(
        "polls are not looked at",
        FLEET,
        "        if self.load is None:\n            return sent_s\n",
        "        return sent_s\n",
    ),
    Fault(
        "full decode instances get more",
        PAIRING,
        "for step_s, member, has_room in steps if has_room]",
        "for step_s, member, has_room in steps]",
    ),
    Fault("a busy instance keeps its requests", PAIRING, "< self._collocate_below", "< 1e9"),
    Fault("an idle instance hands its requests over", PAIRING, "< self._collocate_below", "< 0"),
    Fault(
        "groups mix",
        POOLS,
        "            if member.instance.group in takers and member.instance.name not in exclude\n",
        "            if member.instance.name not in exclude\n",
    ),
    Fault(
        "an excluded instance decodes",
        POOLS,
        "            if member.instance.name not in exclude:\n                takers",
        "            if True:\n                takers",
    ),
    Fault(
        "prediction sees only who decodes now",
        "scheduler/admission/predictive.py",
        "prospect.future_tbt_s > prospect",
        "prospect.present_tbt_s > prospect",
    ),
    Fault(
        "shared work counts for nothing on a busy fleet",
        OUTLOOK,
        "        return self.local_s + weight * self.pressure * self._local[2]\n",
        "        return self.local_s\n",
    ),
    Fault(
        "grids are not looked at",
        OUTLOOK,
        "usable: Floats = np.minimum(tokens, self._most) // self.pool.grid * self.pool.grid",
        "usable: Floats = np.minimum(tokens, self._most)",
    ),
    Fault(
        "sequences that nobody speaks of stay",
        FLEET,
        "        self._phantoms = max(0, old - load.decode_batch) if self._decodes else 0\n",
        "",
    ),
    Fault("time that a request waited before is forgotten", CONDUCTOR, "ttft_s=waited_s + draft", "ttft_s=draft"),
    Fault("low priorities are like others", CONDUCTOR, "if request.priority < 0 else 1.0", "if False else 1.0"),
    Fault("weights are not looked at", FAIR, "share = self._weight(tenant) / sum", "share = 1 / sum"),
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
ESTIMATE_FAULTS = [
    Fault(
        "what an instance says is on top of what was sent",
        FLEET,
        "self._seconds(said - sum(work.tokens for work in self.prefilling.values()))",
        "self._seconds(said)",
    ),
    Fault(
        "a queue is one long prompt",
        FLEET,
        "return queued * seconds / tokens if tokens else self.instance",
        "return self.instance",
    ),
    Fault(
        "cached tokens that an instance counts are of others",
        FLEET,
        "self._seconds(said - sum(work.tokens for",
        "self._seconds(said - sum(work.computed for",
    ),
    Fault(
        "whoever goes sets the front back",
        FLEET,
        "        if request == front:\n            self._front_since_s = now\n",
        "        if front:\n            self._front_since_s = now\n",
    ),
    Fault("a front never moves on", FLEET, "max(self._front_since_s, front.ready_s)", "now"),
    Fault(
        "a front does not wait for its prefix", FLEET, "max(self._front_since_s, front.ready_s)", "self._front_since_s"
    ),
    Fault(
        "what is cancelled stays in what was polled",
        FLEET,
        "        if not is_done:\n            self._told_s",
        "        if False:\n            self._told_s",
    ),
    Fault("who is never reported stays in the queue", FLEET, "if self._tells else sent_s)", "if False else sent_s)"),
    Fault("an instance that says nothing is believed", FLEET, "if self._tells else sent_s)", "if True else sent_s)"),
    Fault(
        "who is on the way to an instance is not in its queue",
        FLEET,
        "min(sent_s, told_s + self._unheard_s)",
        "min(sent_s, told_s)",
    ),
    Fault(
        "sequences of others take no room",
        FLEET,
        "len(self.arriving.works) + self.others_batch\n",
        "len(self.arriving.works)\n",
    ),
    Fault(
        "sequences of others take no time",
        FLEET,
        "batch = here + self.others_batch + more",
        "batch = here + more",
    ),
    Fault(
        "own sequences are others' too",
        FLEET,
        "max(0, load.decode_batch - len(self.decoding.works))",
        "load.decode_batch",
    ),
    Fault("what leaves for decode takes nothing of a link", OUTLOOK, "columns[1, row] += rate", "pass"),
    Fault(
        "disks of others are as fast as memory",
        OUTLOOK,
        "np.maximum(network_s, on_disk * disk_s_per_byte)",
        "network_s",
    ),
    Fault(
        "a prefix is pulled with its disk or not at all",
        OUTLOOK,
        "        if 0 < memory < every:\n",
        "        if False:\n",
    ),
    Fault(
        "only the longest are looked at",
        OUTLOOK,
        "longer.disk_tokens <= source.disk_tokens and longer.busy_bytes <= source.busy_bytes for longer in kept",
        "longer.tokens > source.tokens for longer in kept",
    ),
    Fault(
        "what is expected need not be pulled",
        OUTLOOK,
        "self.node_tokens: Floats = node[:, 2] ",
        "self.node_tokens: Floats = self._levels[2] ",
    ),
    Fault(
        "an instance without a node pulls",
        OUTLOOK,
        "instance.tiers.network_rate if instance.node else 0.0",
        "instance.tiers.network_rate",
    ),
    Fault(
        "a pull that was half over is given back whole",
        TRAFFIC,
        "max(0.0, size - (now - since_s) * rate)",
        "size",
    ),
    Fault(
        "a full instance keeps its requests",
        PAIRING,
        "if member is prefill and has_room and step_s",
        "if member is prefill and step_s",
    ),
    Fault(
        "models that nobody serves are kept",
        POOLS,
        "            if pool.members:\n                self._pools",
        "            if True:\n                self._pools",
    ),
    Fault(
        "one model's waiting is another's",
        FAIR,
        "        tenants = self._waiting.get(model, {})\n",
        "        tenants = {name: one for many in self._waiting.values() for name, one in many.items()}\n",
    ),
    Fault(
        "the last of a tenant's requests takes all",
        FAIR,
        "        if requests > 1:\n",
        "        if waiting_s > seconds:\n",
    ),
    Fault(
        "sessions of all tenants are one",
        CONDUCTOR,
        "self._sessions.get((request.tenant, request.session)) if request.session else None",
        "next((at for (_, name), at in self._sessions.items() if name == request.session), None)",
    ),
    Fault(
        "a deadline is no reason to come back later",
        CONDUCTOR,
        "            late_s = max(late_s, first_token_s - request.deadline_s)\n",
        "",
    ),
    Fault(
        "who can never be served is told to come back soon",
        CONDUCTOR,
        "late_s if late_s < draft.choice.queue_s else RETRY_S[1]",
        "late_s",
    ),
    Fault(
        "a holder that went keeps its name",
        CONDUCTOR,
        "        if self._holders.pop(name, None) is not None:\n",
        "        if self._holders.get(name) is not None:\n",
    ),
    Fault("prefixes end at the first coarse place", EXPECTED, "return fine + coarse", "return fine"),
    Fault(
        "coarse places are fine ones",
        EXPECTED,
        "(places + (COARSE - 1) * max(0, places - FINE))",
        "places",
    ),
    Fault(
        "who has more is looked for no further",
        EXPECTED,
        "        while stop := bisect_left(range(1, stop + 1), -len(found), key=instances):\n",
        "        if stop := bisect_left(range(1, stop + 1), -len(found), key=instances):\n",
    ),
]
