"""The verifiers once more, slowly and literally from their formulas, with plain lists and explicit uniforms.

Trees are nested: a node is (index, token); children(parent) lists them. p_of(path) is the target's distribution.
"""


def residual(p, q):
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def inverse(weights, u):
    """The first token at which the running sum exceeds u times the total."""
    goal, running = u * sum(weights), 0.0
    for token, weight in enumerate(weights):
        running += weight
        if running > goal:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


def one_hot(token, size):
    return [1.0 if v == token else 0.0 for v in range(size)]


def walk(draft, own_token):
    """Coupled: own_token(path) is the target's draw."""
    path, nodes, parent = [], [], -1
    while True:
        token = own_token(path)
        path.append(token)
        child = [n for n in range(len(draft)) if draft.parents[n] == parent and draft.tokens[n] == token]
        if not child:
            return path, nodes
        parent = child[0]
        nodes.append(parent)


def rejection(draft, p_of, u_accept, u_residual, u_bonus):
    path, nodes, parent = [], [], -1
    while True:
        p = list(p_of(path))
        children = [n for n in range(len(draft)) if draft.parents[n] == parent]
        q = (draft.q or {}).get(parent)
        drawn = q is not None
        q = list(q) if drawn else None
        taken = None
        for n in children:
            x = draft.tokens[n]
            law = q if drawn else one_hot(x, len(p))
            if sum(law) <= 0:
                break
            if u_accept[n] < min(1.0, p[x] / law[x]) or sum(residual(p, law)) <= 0:
                taken = n
                break
            rest = residual(p, law)
            p = [weight / sum(rest) for weight in rest]
            if drawn:
                q[x] = 0.0
                total = sum(q)
                q = [weight / total if total > 0 else 0.0 for weight in q]
        if taken is None:
            return [*path, inverse(p, u_residual if children else u_bonus)], nodes
        path.append(draft.tokens[taken])
        nodes.append(taken)
        parent = taken


def block(draft, p_of, u_accept, u_residual, u_bonus):
    n = len(draft)
    p = [list(p_of(draft.tokens[:i])) for i in range(n + 1)]  # p[i] is p_(i+1)
    q = [list((draft.q or {}).get(i - 1, one_hot(draft.tokens[i], len(p[0])))) for i in range(n)]
    joint = [1.0]
    for i in range(1, n + 1):
        x = draft.tokens[i - 1]
        joint.append(min(1.0, joint[-1] * p[i - 1][x] / q[i - 1][x]))
    accepted = 0
    for i in range(1, n + 1):
        if i == n:
            chance = joint[n]
        else:
            mass = sum(residual([joint[i] * weight for weight in p[i]], q[i]))
            below = mass + 1.0 - joint[i]
            chance = mass / below if below > 0 else 1.0
        if u_accept[i - 1] < chance:
            accepted = i
    if accepted == n:
        return [*draft.tokens, inverse(p[n], u_bonus)], list(range(n))
    rest = residual([joint[accepted] * weight for weight in p[accepted]], q[accepted])
    rest = rest if sum(rest) > 0 else p[accepted]
    return [*draft.tokens[:accepted], inverse(rest, u_residual)], list(range(accepted))
