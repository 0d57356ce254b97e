cat > query.sql <<'SQL'
SELECT name, sum(orders.amount - coalesce((SELECT sum(amount) FROM refunds WHERE order_id = orders.id), 0)) AS paid
FROM customers JOIN orders ON customer_id = customers.id
GROUP BY customers.id HAVING paid > 100 ORDER BY paid DESC, name
SQL
