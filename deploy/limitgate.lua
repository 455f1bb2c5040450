-- HAProxy's action lua.limitgate: asks the gate about a request, and answers if the gate refuses it. See haproxy.cfg.
local fails_open = true
local timeout_ms = 250
local fields = {limit = "x-ratelimit-limit", remaining = "x-ratelimit-remaining", reset = "x-ratelimit-reset"}
-- Fields of the connection or the body, and those that this action sets.
local dropped = {["connection"] = true, ["content-length"] = true, ["expect"] = true, ["keep-alive"] = true, ["te"] = true,
    ["transfer-encoding"] = true, ["upgrade"] = true, ["x-forwarded-for"] = true, ["x-original-method"] = true,
    ["x-original-uri"] = true, ["x-limitgate-answered"] = true}

core.register_action("limitgate", {"http-req"}, function(txn)
    local headers = {}
    for name, values in pairs(txn.http:req_get_headers()) do
        if not dropped[name] then
            headers[name] = {}
            for place, value in pairs(values) do
                headers[name][place + 1] = value
            end
        end
    end
    local method = txn.sf:method()
    headers["x-original-method"] = {method}
    local uri = txn.sf:pathq()
    headers["x-original-uri"] = {uri ~= "" and uri or "*"}    -- as in OPTIONS *
    headers["x-forwarded-for"] = {txn.sf:src()}
    local answer = core.httpclient():get{
        url = "http://limitgate/haproxy", dst = "abns@limitgate", headers = headers, timeout = timeout_ms}
    local found = answer and answer.headers or {}
    local is_answered = found["x-limitgate-answered"] ~= nil
    if is_answered and answer.status < 300 then
        for name, field in pairs(fields) do
            if found[field] then
                txn:set_var("txn.lg_" .. name, found[field][0])
            end
        end
    elseif is_answered or not fails_open then
        local reply = txn:reply{status = is_answered and answer.status or 503}
        for name, values in pairs(is_answered and found or {}) do
            if name ~= "content-length" and name ~= "connection" and name ~= "x-limitgate-answered" then
                reply:add_header(name, values[0])
            end
        end
        reply:set_body(is_answered and method ~= "HEAD" and answer.body or "")
        txn:done(reply)
    end
end)
