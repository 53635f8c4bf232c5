-- fence(key, token, keep_ms): compares a token with the highest token that has passed before. An
-- equal or higher token passes, and is kept as the highest one. A lower token is refused.
--
-- key      the key that keeps the highest token that has passed, as decimal text
-- token    decimal text, from 1 to 9223372036854775807, without sign or leading zeros
-- keep_ms  how long the fence is remembered after the last token that has passed; '0' for ever
-- Returns  true if the token has passed; false if it is refused, because a higher token has passed
--          before. A text that is not a token raises an error
--
-- Call it before the first write of the script. A script is atomic, but it has no rollback: if an
-- error ends the script, the writes before the error stay.

local fence
do
  -- Numbers in Lua are doubles, which are exact up to 2^53 only. So a token is compared in two
  -- halves of its 19 digits, each of which is exact.
  local function halves(token)
    if type(token) ~= 'string' or #token > 19 or not string.find(token, '^[1-9]%d*$') then return nil end
    local digits = string.rep('0', 19 - #token) .. token
    local high, low = tonumber(string.sub(digits, 1, 10)), tonumber(string.sub(digits, 11))
    -- The greatest token is 2^63 - 1.
    if high > 9223372036 or (high == 9223372036 and low > 854775807) then return nil end
    return high, low
  end

  fence = function(key, token, keep_ms)
    local high, low = halves(token)
    if not high then error('not a fencing token', 0) end
    local highest = redis.call('GET', key)
    if highest then
      local seen_high, seen_low = halves(highest)
      if not seen_high then error('the key of the fence keeps something else', 0) end
      if high < seen_high or (high == seen_high and low < seen_low) then return false end
    end
    if keep_ms == '0' then
      redis.call('SET', key, token)
    else
      redis.call('SET', key, token, 'PX', keep_ms)
    end
    return true
  end
end
